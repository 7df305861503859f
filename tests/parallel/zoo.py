"""Real models, a few steps each, under any strategy: what the promise of equal bits is worth outside of toys."""

from dataclasses import replace
from typing import Any

import timm
import torchvision
import toys
from torch import Tensor, nn
from toys import Case


class Vit(nn.Module):
    """vit_tiny with two of its blocks, dropout and stochastic depth."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = timm.create_model(
            "vit_tiny_patch16_224",
            img_size=32,
            patch_size=8,
            depth=3,
            num_classes=toys.CLASSES,
            drop_rate=0.1,
            attn_drop_rate=0.1,
            drop_path_rate=0.2,
        )

    def forward(self, images: Tensor) -> Tensor:
        outputs: Tensor = self.inner(images)
        return outputs


class ResNet(nn.Module):
    """torchvision's ResNet-18."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torchvision.models.resnet18(num_classes=toys.CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        outputs: Tensor = self.inner(images)
        return outputs


class EfficientNet(nn.Module):
    """timm's efficientnet_b0, with stochastic depth."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = timm.create_model("efficientnet_b0", num_classes=toys.CLASSES, drop_rate=0.2, drop_path_rate=0.2)

    def forward(self, images: Tensor) -> Tensor:
        outputs: Tensor = self.inner(images)
        return outputs


class ConvNext(nn.Module):
    """timm's convnext_atto with two of its stages; its images are permuted to and fro."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = timm.create_model("convnext_atto", depths=(1, 1, 0, 0), num_classes=toys.CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        outputs: Tensor = self.inner(images)
        return outputs


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


MODELS: dict[str, type[nn.Module]] = {
    "resnet18": ResNet,
    "vit_tiny": Vit,
    "efficientnet_b0": EfficientNet,
    "convnext": ConvNext,
    "mlp": Mlp,
}


def case(model: str, **changes: Any) -> Case:
    """Return a recipe of two steps, the second of which is smaller."""
    return replace(Case(4, samples=(12, 9), side=32, model=MODELS[model], bucket_bytes=2**20), **changes)
