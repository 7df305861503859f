"""Exports to a folder for the Auto classes of transformers.

The folder contains the config with the class names, the weights, and the tokenizer or image processor.
"""

from importlib import import_module
from pathlib import Path
from typing import Any, Final

from lockstep.exports.base import ExportSource, check_origin
from lockstep.inference.saved import SavedModel
from lockstep.inference.text import get_tokenizer
from lockstep.models.hugging_face import get_model_kind, remove_special_tokens

SUFFIX: Final = ""
SAME_KERNELS: Final = True


def check(saved: SavedModel) -> None:
    """See Format."""
    check_origin(saved, "transformers")
    if saved.tokenizer_type:
        get_tokenizer(saved)  # checks that the tokenizer file exists and matches the run


def write(export_source: ExportSource, path: Path) -> str:
    """See Format."""
    saved, model = export_source.saved, export_source.model
    config: Any = model.config
    if "use_cache" in config.to_dict():
        config.use_cache = True  # disabled during training, but generating text needs the cache
    if saved.tokenizer_type in ("byte", "character"):
        remove_special_tokens(model)
    import_module("transformers.utils.logging").disable_progress_bar()
    model.save_pretrained(str(path))  # type: ignore[operator]
    if saved.tokenizer_type:
        tokenizer_class: Any = import_module("transformers").PreTrainedTokenizerFast
        library_tokenizer = get_tokenizer(saved).library
        length_option = {"model_max_length": saved.dataset_info.context} if saved.dataset_info.context else {}
        tokenizer_class(tokenizer_object=library_tokenizer, **length_option).save_pretrained(str(path))
    if processor := get_image_settings(saved):
        _make_image_processor(saved, processor).save_pretrained(str(path))
    return ""


def get_image_settings(saved: SavedModel) -> dict[str, Any] | None:
    """Return the size, mean and std of the run's images, or None if an image processor doesn't support them.

    Images must be square, and have three channels, a mean and a std.
    """
    (mean, std), shape = saved.mean_and_std, saved.dataset_info.shape or []
    if len(shape) != 3 or shape[0] != 3 or shape[1] != shape[2] or not (mean and std):
        return None
    return {"size": shape[1], "mean": mean, "std": std}


def get_auto_class_name(saved: SavedModel) -> str:
    """Return the name of the Auto class that loads the model of a run."""
    return f"AutoModelFor{get_model_kind(saved.stored_dataset_info)}"


def _make_image_processor(saved: SavedModel, settings: dict[str, Any]) -> Any:
    from PIL.Image import Resampling
    from transformers import ViTImageProcessor

    square = {"height": settings["size"], "width": settings["size"]}
    common = {"image_mean": settings["mean"], "image_std": settings["std"], "resample": int(Resampling.BILINEAR)}
    if saved.crop_settings is None:
        return ViTImageProcessor(size=square, **common)
    from transformers import CLIPImageProcessor  # this processor crops the center

    return CLIPImageProcessor(size={"shortest_edge": saved.crop_settings.resize}, crop_size=square, **common)
