"""A folder that `timm.create_model("local-dir:FOLDER", pretrained=True)` takes: weights, size, names, mean and std."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from lockstep.config.base import values
from lockstep.data.images.pictures import cut_of
from lockstep.data.request import request_of
from lockstep.errors import UsageError
from lockstep.exports.base import Subject
from lockstep.inference.saved import Saved
from lockstep.models.find import construction, origin_of

SUFFIX: Final = ""
SAME_KERNELS: Final = True

_CUT: Final = ("folder", "webdataset")


def check(saved: Saved) -> None:
    """See Format."""
    asked, facts = saved.recipe.model, saved.facts
    if origin_of(asked.name, asked.source) != "timm":
        raise UsageError(f"{saved.path}: model {asked.name} is none of timm; use --to torch or --to safetensors")
    if facts.classes is None or facts.pixels or len(facts.shape or ()) != 3:
        raise UsageError(f"{saved.path}: timm's models tell classes of images; use --to torch or --to safetensors")


def write(subject: Subject, place: Path) -> str:
    """See Format."""
    from timm.models import save_for_hf

    saved = subject.saved
    facts, asked = saved.facts, saved.recipe.model
    made = construction(name=asked.name, source=asked.source, options=asked.options, facts=saved.known)
    options = {name: value for name, value in made.options.items() if name != "num_classes"}
    config: dict[str, Any] = {"label_names": facts.classes, "pretrained_cfg": _pretrained(saved)}
    if options:
        config["model_args"] = options
    save_for_hf(subject.model, str(place), model_config=config, safe_serialization=True)
    return ""


def _pretrained(saved: Saved) -> dict[str, Any]:
    facts, data = saved.facts, saved.recipe.data
    mean, std = data.mean or facts.mean, data.std or facts.std
    size: dict[str, Any] = {"input_size": list(facts.shape or ()), "interpolation": "bilinear", "crop_pct": 1.0}
    if data.name in _CUT:
        cut = cut_of(request_of(values(data)))
        size["crop_pct"] = cut.size / cut.resize
    return size | ({"mean": list(mean), "std": list(std)} if mean and std else {})
