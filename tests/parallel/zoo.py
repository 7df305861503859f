"""Real models, a few steps each, under any strategy: what the promise of equal bits is worth outside of toys."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import timm
import torchvision
import toys
from torch import nn
from toys import Case


class Mlp(nn.Sequential):
    """A user's own, in containers; its widths divide by nothing."""

    def __init__(self) -> None:
        super().__init__(
            nn.Flatten(),
            nn.Linear(3 * 32 * 32, 37),
            nn.ReLU(),
            nn.Sequential(nn.Dropout(0.2), nn.Linear(37, 23), nn.LayerNorm(23), nn.GELU()),
            nn.Linear(23, toys.CLASSES),
        )


vit = partial(  # two of its blocks, dropout and stochastic depth
    timm.create_model,
    "vit_tiny_patch16_224",
    img_size=32,
    patch_size=8,
    depth=3,
    num_classes=toys.CLASSES,
    drop_rate=0.1,
    attn_drop_rate=0.1,
    drop_path_rate=0.2,
)

MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet18": partial(torchvision.models.resnet18, num_classes=toys.CLASSES),
    "vit_tiny": vit,
    "efficientnet_b0": partial(  # with stochastic depth
        timm.create_model, "efficientnet_b0", num_classes=toys.CLASSES, drop_rate=0.2, drop_path_rate=0.2
    ),
    # Two of its stages; its images are permuted to and fro.
    "convnext": partial(timm.create_model, "convnext_atto", depths=(1, 1, 0, 0), num_classes=toys.CLASSES),
    "mlp": Mlp,
}


def case(model: str, **changes: Any) -> Case:
    """Return a recipe of two steps, the second of which is smaller."""
    return replace(Case(4, samples=(12, 9), side=32, model=MODELS[model], bucket_bytes=2**20), **changes)
