"""Exports a saved run to a file format of another library.

The export is written under a temporary name, checked by loading it in a separate process, and then renamed.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Literal, cast

import torch
from torch import nn

from lockstep.common.location import is_url
from lockstep.common.names import format_choices
from lockstep.common.user_code import UserCode
from lockstep.common.version import __version__
from lockstep.core.batch import Inputs, call_model, map_tensors
from lockstep.errors import TrainingError, UsageError, convert_os_error
from lockstep.exports.base import ExportSource, Format
from lockstep.exports.check import check_export
from lockstep.exports.sample import make_sample
from lockstep.exports.to_safetensors import describe_builder
from lockstep.exports.to_transformers import get_auto_class_name, get_image_settings
from lockstep.inference.saved import SavedModel, Weights, open_saved
from lockstep.inference.text import get_tokenizer
from lockstep.models.adapters import merge_adapters
from lockstep.models.reference import remove_reference
from lockstep.run.background import run_in_background, to_arguments
from lockstep.run.evaluation import EvalRequest
from lockstep.setup.chunk_check import check_saved_model
from lockstep.tasks.batches import get_predictions

FORMATS: Final = ("safetensors", "torch", "onnx", "transformers", "timm")
FOLDER: Final = "exports"  # default folder of exports, in the run folder

_CHECKED_TOKENS: Final = 200  # maximum number of tokens for checking a tokenizer


@dataclass(frozen=True)
class Exported:
    """The path of an export, the supported input sizes as text, and the result of the check as text.

    `sizes` is empty if the format doesn't restrict the input sizes.
    """

    path: Path
    sizes: str
    check: str


def export(
    run: str | Path,
    to: Literal["safetensors", "torch", "onnx", "transformers", "timm"],
    *,
    out: str | Path | None = None,
    best: bool = False,
    weights: Weights | None = None,
    overrides: Mapping[str, Any] | None = None,
    trust: bool = False,
) -> Exported:
    """Export a run folder or a checkpoint in a background process, and check the result.

    This is the Python equivalent of `lockstep export`. After the export is written, a process without Lockstep loads it
    and runs it on the same input as the model of the run. If the outputs differ, TrainingError is raised and the export
    is deleted. `out` defaults to a name in the folder `exports` of the run. Raises UsageError if `out` already exists,
    or if the format doesn't support the run.

    If `run` is a run folder, its newest checkpoint is used, or its best checkpoint with `best=True`. `weights` is
    `model` or `ema`. By default, averaged weights (EMA) are used if the run has them. User code that the recipe
    references only runs if `overrides` also reference it, or if you pass `trust=True`.
    """
    request = EvalRequest(str(run), tuple(to_arguments(overrides)), trust, best, "export")
    check_out(run, out)
    path = None if out is None else Path(out)
    [result] = run_in_background(lambda: [asdict(export_saved(open_saved(request, weights), to, path))])
    return Exported(Path(result["path"]), result["sizes"], result["check"])


def check_out(run: str | Path, out: str | Path | None) -> None:
    """Raise UsageError if a run in object storage is exported without `out`, because its folder is only a copy."""
    if out is None and is_url(run):
        raise UsageError(f"{run}: an export of a run in object storage needs a path on this host; set --out")


def export_saved(saved: SavedModel, format_name: str, out: Path | None = None) -> Exported:
    """Export a saved run to the format `format_name`, which must be in FORMATS, and check the result.

    A process without Lockstep loads the export and compares its outputs. `out` defaults to a name in the folder
    `exports` of the run. Raises UsageError if `out` already exists, or if the format doesn't support the run. Raises
    TrainingError if the check fails. In this case, nothing is left at `out`.
    """
    if format_name not in FORMATS:
        raise UsageError(f"--to {format_name}: no such format{format_choices(format_name, FORMATS)}")
    export_format = cast(Format, import_module(f"lockstep.exports.to_{format_name}"))
    export_format.check(saved)
    path = out or _make_default_path(saved, export_format.SUFFIX or f"-{format_name}")
    if os.path.lexists(path):
        raise UsageError(f"{path}: already exists; remove it, or use a different name in --out")
    sample = make_sample(saved)
    model = saved.build_model()
    remove_reference(model)
    check_saved_model(saved.path, model, saved.recipe.model, sample.inputs)
    outputs = _run_model(saved, model, sample.inputs)  # before adapters are merged
    has_adapters = merge_adapters(model)
    export_source = ExportSource(saved, model, sample.inputs, make_model_card(saved))
    temporary = path.with_name(f".tmp-{os.getpid()}-{path.name}{export_format.SUFFIX}")  # torch requires the suffix
    exact = export_format.SAME_KERNELS and not has_adapters
    try:
        with convert_os_error(TrainingError, f"{path}: cannot write", "; use a different --out"):
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.touch(exist_ok=False)  # raises OSError here, because exporters may raise other exceptions
            mode = stat.S_IMODE(temporary.stat().st_mode)  # follows the umask
            temporary.unlink()
            sizes = export_format.write(export_source, temporary)
            deviation = check_export(
                format_name, temporary, model, sample.inputs, outputs, _make_check_settings(export_source), exact
            )
            # The library safetensors makes its files readable for their owner only, regardless of the umask.
            for file in [path for path in (temporary, *temporary.rglob("*")) if path.is_file()]:
                file.chmod(mode)
            os.rename(temporary, path)
    finally:
        with suppress(OSError):
            shutil.rmtree(temporary) if temporary.is_dir() else temporary.unlink()
    return Exported(path, sizes, f"with {sample.origin}: {deviation.description}")


def make_model_card(saved: SavedModel) -> dict[str, Any]:
    """Return a JSON-compatible dict with the information that users of the weights need."""
    facts, (mean, std) = saved.dataset_info, saved.mean_and_std
    card: Mapping[str, Any] = {
        "model": saved.recipe.model.name,
        "classes": facts.classes,
        "shape": facts.shape,
        "mean": mean,
        "std": std,
        "columns": facts.columns,
        "targets": facts.targets,
        "vocabulary": facts.vocabulary,
        "context": facts.context,
        "tokenizer": facts.tokenizer,
        "step": saved.step,
        "weights": saved.weights,
        "weights_sha256": saved.weights_sha256,
        "lockstep": __version__,
    }
    return {name: value for name, value in card.items() if value is not None}


def _make_default_path(saved: SavedModel, suffix: str) -> Path:
    run = saved.path.absolute().parent.parent
    with suppress(ValueError):
        run = run.relative_to(Path.cwd())
    return run / FOLDER / f"{saved.path.name}{suffix}"


def _run_model(saved: SavedModel, model: nn.Module, inputs: Inputs) -> torch.Tensor:
    torch.set_num_threads(saved.recipe.threads)
    with torch.no_grad(), UserCode(saved.name):
        return get_predictions(
            call_model(model, map_tensors(torch.clone, inputs)), saved.name
        )  # cloned, as in the check


def _make_check_settings(export_source: ExportSource) -> dict[str, Any]:
    """Return the settings for the process that checks the export, as a JSON-compatible dict."""
    saved, facts = export_source.saved, export_source.saved.dataset_info
    job: dict[str, Any] = {
        "threads": saved.recipe.threads,
        "lockstep": str(describe_builder(saved, export_source.model).get("function", "")).startswith("lockstep."),
        "class": get_auto_class_name(saved),
        "classes": facts.classes,
        "pixels": get_image_settings(saved),
        **{name: export_source.model_card.get(name) for name in ("mean", "std")},
        "input_size": facts.shape,
    }
    if saved.tokenizer_type:
        tokenizer = get_tokenizer(saved)
        ids = next(
            iter(export_source.inputs.values() if isinstance(export_source.inputs, Mapping) else export_source.inputs)
        )
        job["text"] = tokenizer.decode(ids[0, :_CHECKED_TOKENS].numpy())
        job["ids"] = tokenizer.encode(job["text"]).tolist()
    return job
