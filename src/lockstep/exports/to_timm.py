"""Exports to a folder for `timm.create_model("local-dir:FOLDER", pretrained=True)`.

The folder contains the weights, the input size, the class names, and the mean and std of the data.
"""

from pathlib import Path
from typing import Any, Final

from lockstep.errors import UsageError
from lockstep.exports.base import ExportSource, check_origin
from lockstep.inference.saved import SavedModel

SUFFIX: Final = ""
SAME_KERNELS: Final = True


def check(saved: SavedModel) -> None:
    """See Format."""
    check_origin(saved, "timm")
    facts = saved.dataset_info
    if facts.classes is None or facts.pixels or len(facts.shape or ()) != 3:
        raise UsageError(f"{saved.path}: --to timm requires an image classifier; use --to torch or --to safetensors")


def write(export_source: ExportSource, path: Path) -> str:
    """See Format."""
    from timm.models import save_for_hf

    saved = export_source.saved
    (mean, std), crop = saved.mean_and_std, saved.crop_settings
    preprocessing = {
        "input_size": list(saved.dataset_info.shape or ()),
        "interpolation": "bilinear",
        "crop_pct": crop.size / crop.resize if crop else 1.0,
        **({"mean": mean, "std": std} if mean and std else {}),
    }
    options = {name: value for name, value in saved.get_construction().options.items() if name != "num_classes"}
    config: dict[str, Any] = {"label_names": saved.dataset_info.classes, "pretrained_cfg": preprocessing}
    if options:
        config["model_args"] = options
    save_for_hf(export_source.model, str(path), model_config=config, safe_serialization=True)
    return ""
