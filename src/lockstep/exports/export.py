"""A saved run written as another program's file, which is loaded back and compared before it gets its name."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Literal, cast

import torch
from torch import nn

from lockstep.common.names import choices
from lockstep.common.own_code import OwnCode
from lockstep.common.version import __version__
from lockstep.core.batch import Inputs, call, map_tensors
from lockstep.errors import TrainingError, UsageError, os_error_as
from lockstep.exports.base import ExportSource, Format
from lockstep.exports.check import check_export
from lockstep.exports.sample import sample_of
from lockstep.exports.to_safetensors import builder_of
from lockstep.exports.to_transformers import automatic_class, image_processor
from lockstep.inference.saved import SavedModel, Weights, open_saved
from lockstep.inference.text import tokenizer_for
from lockstep.models.adapters import merge_adapters
from lockstep.run.background import as_words, in_background
from lockstep.run.evaluation import EvalRequest
from lockstep.setup.chunk_check import check_saved
from lockstep.tasks.batches import predictions

FORMATS: Final = ("safetensors", "torch", "onnx", "transformers", "timm")
FOLDER: Final = "exports"  # in a run folder, where nothing else is asked for

_TEXT: Final = 200  # tokens that a tokenizer is tried with


@dataclass(frozen=True)
class Exported:
    """What was written, which inputs it takes (in words, "" where that says nothing), and what its check found."""

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
    """Export a run folder or a checkpoint as `lockstep export` does, in a background process, and check the result.

    What was written is loaded back in a process without Lockstep, and both models are run on the same input: where the
    outputs differ, TrainingError is raised and nothing is left. `out` left out is in the run's folder `exports`; what
    is there already raises UsageError, as does a format that the run does not fit.

    Of a run folder the newest checkpoint is taken, or the `best`. `weights` left out are averaged ones (ema) if the run
    has them. Code that its recipe names runs only if `overrides` name it too, or with `trust`.
    """
    asked = EvalRequest(str(run), tuple(as_words(overrides)), trust, best, "export")
    place = None if out is None else Path(out)
    [found] = in_background(lambda: [asdict(export_saved(open_saved(asked, weights), to, place))])
    return Exported(Path(found["path"]), found["sizes"], found["check"])


def export_saved(saved: SavedModel, to: str, out: Path | None = None) -> Exported:
    """Write a saved run as `to`, one of FORMATS, and check it: load it back in a process without Lockstep, and compare.

    `out` left out is in the run's folder `exports`. UsageError where it is there already, or the run does not fit the
    format; TrainingError where the check fails, and then nothing is left at `out`.
    """
    if to not in FORMATS:
        raise UsageError(f"--to {to}: no such format{choices(to, FORMATS)}")
    chosen = cast(Format, import_module(f"lockstep.exports.to_{to}"))
    chosen.check(saved)
    place = out or _place(saved, chosen.SUFFIX or f"-{to}")
    if os.path.lexists(place):
        raise UsageError(f"{place}: is there already; remove it, or choose another name with --out")
    sample = sample_of(saved)
    model = saved.model()
    check_saved(saved.path, model, saved.recipe.model, sample.inputs)
    outputs = _outputs(saved, model, sample.inputs)  # with adapters as they are
    has_adapters = merge_adapters(model)
    subject = ExportSource(saved, model, sample.inputs, model_card(saved))
    temporary = place.with_name(f".tmp-{os.getpid()}-{place.name}{chosen.SUFFIX}")  # torch looks at how it ends
    exact = chosen.SAME_KERNELS and not has_adapters
    try:
        with os_error_as(TrainingError, f"{place}: cannot be written", "; choose another --out"):
            place.parent.mkdir(parents=True, exist_ok=True)
            temporary.touch(exist_ok=False)  # what writes it may raise errors of another kind
            temporary.unlink()
            sizes = chosen.write(subject, temporary)
            found = check_export(to, temporary, model, sample.inputs, outputs, _job(subject), exact)
            os.rename(temporary, place)
    finally:
        with suppress(OSError):
            shutil.rmtree(temporary) if temporary.is_dir() else temporary.unlink()
    return Exported(place, sizes, f"with {sample.origin}: {found.words}")


def model_card(saved: SavedModel) -> dict[str, Any]:
    """Return what users of the weights need to know of them, ready for JSON."""
    facts, (mean, std) = saved.facts, saved.mean_and_std
    found: Mapping[str, Any] = {
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
    return {name: value for name, value in found.items() if value is not None}


def _place(saved: SavedModel, suffix: str) -> Path:
    run = saved.path.absolute().parent.parent
    with suppress(ValueError):
        run = run.relative_to(Path.cwd())
    return run / FOLDER / f"{saved.path.name}{suffix}"


def _outputs(saved: SavedModel, model: nn.Module, inputs: Inputs) -> torch.Tensor:
    torch.set_num_threads(saved.recipe.threads)
    with torch.no_grad(), OwnCode(saved.name):
        return predictions(call(model, map_tensors(torch.clone, inputs)), saved.name)  # aligned as those of the check


def _job(subject: ExportSource) -> dict[str, Any]:
    """Return what the checking process receives."""
    saved, facts = subject.saved, subject.saved.facts
    job: dict[str, Any] = {
        "threads": saved.recipe.threads,
        "lockstep": str(builder_of(saved, subject.model).get("function", "")).startswith("lockstep."),
        "class": automatic_class(saved),
        "classes": facts.classes,
        "pixels": image_processor(saved),
        **{name: subject.model_card.get(name) for name in ("mean", "std")},
        "input_size": facts.shape,
    }
    if saved.tokenizer_by:
        tokenizer = tokenizer_for(saved)
        given = next(iter(subject.inputs.values() if isinstance(subject.inputs, Mapping) else subject.inputs))
        job["text"] = tokenizer.decode(given[0, :_TEXT].numpy())
        job["ids"] = tokenizer.encode(job["text"]).tolist()
    return job
