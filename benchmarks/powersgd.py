"""What PowerSGD sends of the gradients of a step, counted from the shapes of the parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import timm
import torchvision
from torch import Size, nn

from benchmarks.report import Result, compare
from lockstep.device.meta import build_on_meta
from lockstep.parallel.powersgd import count_elements_sent

MODELS: Final[dict[str, Callable[[], nn.Module]]] = {
    "ResNet-18": torchvision.models.resnet18,
    "ViT-Tiny": lambda: timm.create_model("vit_tiny_patch16_224"),
}
COLUMNS: Final = (1, 2, 4)
WHOLE: Final = "whole gradients"


def results(quick: bool) -> list[Result]:
    """Count the bytes of each model; nothing is sent."""
    return [_counted(name) for name in MODELS]


def _counted(name: str) -> Result:
    shapes = [parameter.shape for parameter in build_on_meta(MODELS[name]).parameters()]
    elements = {WHOLE: sum(Size(shape).numel() for shape in shapes)}
    for columns in COLUMNS:
        elements[f"powersgd_rank {columns}"] = sum(count_elements_sent(shape, columns) for shape in shapes)
    mib = {each: [count * 4 / 2**20] for each, count in elements.items()}
    return compare(f"powersgd-{name}", f"sent of the gradients of a step: {name}, fp32", "MiB", mib, WHOLE)
