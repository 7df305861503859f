"""What `lockstep plan` measures with pretended peers, beside a run of all ranks: memory, and the time of a step.

Exchanges take what they would by a link of 1 GB/s in a plan, and what gloo takes on this machine in a run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from benchmarks.report import Result, Target, compare
from lockstep.config.load import load
from lockstep.config.placement import StrategyConfig
from lockstep.planning.measure import Figures
from lockstep.planning.survey import LINK, largest, made_ready, with_placement
from lockstep.run.resolved import resolve

_IMAGES: Final = {"name": "synthetic", "image_size": 32, "options": {"samples": 256, "validation_samples": 16}}
_TEXT: Final = {"name": "shakespeare", "options": {"context": 64}}
_SGD: Final = {"name": "sgd", "lr": 0.1}
_ADAM: Final = {"name": "adamw", "lr": 0.001}
RECIPES: Final[Mapping[str, Mapping[str, Any]]] = {
    "ResNet-18": {
        "model": {"name": "resnet18", "source": "torchvision"},
        "data": _IMAGES,
        "batch": 32,
        "optimizer": _SGD,
    },
    "ViT-Tiny": {
        "model": {"name": "vit_tiny_patch16_224", "options": {"img_size": 32, "patch_size": 4}},
        "data": _IMAGES,
        "batch": 32,
        "optimizer": _ADAM,
        "clip_norm": 1.0,
    },
    "GPT": {
        "model": {"name": "gpt", "options": {"width": 384, "layers": 6, "heads": 6}, "chunks": 2},
        "data": _TEXT,
        "batch": 16,
        "optimizer": _ADAM,
        "clip_norm": 1.0,
    },
}
PLACEMENTS: Final = (("ddp", 2), ("zero1", 2), ("zero2", 2), ("zero3", 2), ("ddp", 4), ("zero3", 4), ("hsdp", 4))
CUT: Final = (("tensor", 2),)  # with chunks
_ROOM: Final = (0.98, 1.05)  # times the memory that all ranks show


def results(quick: bool) -> Iterator[Result]:
    """Compare each placement of each recipe, once: the memory of two such runs is the same."""
    with TemporaryDirectory(prefix="plan-") as folder:
        for name in ["ViT-Tiny"] if quick else RECIPES:
            yield from _of_recipe(name, Path(folder), quick)


def _of_recipe(name: str, folder: Path, quick: bool) -> Iterator[Result]:
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps({"recipe": {"microbatches": 4, "epochs": 1, **RECIPES[name]}}), encoding="utf-8")
    loaded = load(str(file), [])
    ready = made_ready(loaded)
    cut = RECIPES[name]["model"].get("chunks", 1) > 1
    for strategy, processes in (("zero3", 2),) if quick else (*PLACEMENTS, *(CUT if cut else ())):
        placed = resolve(with_placement(loaded, StrategyConfig(name=strategy), processes), processes)
        pretended, reason = largest(placed, ready, LINK)
        real, also = largest(placed, ready, None)
        assert pretended is not None, reason
        assert real is not None, also
        yield from _compared(f"{name}, {strategy} on {processes}", pretended, real)


def _compared(of: str, pretended: Figures, real: Figures) -> list[Result]:
    least, most = _ROOM
    memory = {"all ranks": [real.peak / 2**20], "plan": [pretended.peak / 2**20]}
    seconds = {"all ranks": [real.seconds], "plan": [pretended.seconds]}
    targets = [Target("plan", "all ranks", "at least", least), Target("plan", "all ranks", "at most", most)]
    unit, key = "MiB, the largest rank", of.replace(", ", "-").replace(" ", "-")
    return [
        compare(f"plan-memory-{key}", f"plan: memory, most in a step, {of}", unit, memory, "all ranks", targets),
        compare(f"plan-time-{key}", f"plan: a step, {of}", "s", seconds, "all ranks"),
    ]
