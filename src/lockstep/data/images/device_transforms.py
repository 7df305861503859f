"""What happens to a batch of images, or of other inputs with classes, on its device: augment, normalise, mix."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lockstep.core import random
from lockstep.core.batch import Batch
from lockstep.data.base import Request
from lockstep.data.images.augment import DRAWS, augmenting_key, constants, mix, normalise, places_of, taken
from lockstep.errors import UsageError
from lockstep.tasks.facts import whole_samples


@dataclass(frozen=True)
class ImageTransforms:
    """What is done to (inputs, targets) on the device; `mean` None is data that is no image and stays as it is."""

    device: torch.device
    classes: int
    seed: int = 0
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    crop_padding: int = 0
    flip: bool = False
    mixup: float = 0.0
    cutmix: float = 0.0
    mix_probability: float = 1.0

    def check(self, shape: tuple[int, ...]) -> None:
        """Raise UsageError where this cannot be done to samples of `shape`."""
        if found := list(self._misfits(shape)):
            raise UsageError("\n".join(found))

    def _misfits(self, shape: tuple[int, ...]) -> Iterator[str]:
        image = len(shape) == 3
        if not image and (self.crop_padding or self.flip):
            yield f"recipe.data.augment: samples of shape {shape} are no images; leave crop_padding and flip out"
        for name, values, other, others in (("mean", self.mean, "std", self.std), ("std", self.std, "mean", self.mean)):
            if values is None:
                continue
            if others is None:
                yield f"recipe.data.{name}: given without {other}, which this data set has none of; give both, or none"
            elif not image or len(values) != shape[0]:
                has = f"{shape[0]} channels" if image else f"shape {shape}, no channels"
                yield f"recipe.data.{name}: {len(values)} values, but samples have {has}; give one for each channel"
        if image and self.crop_padding >= min(shape[1:]):
            yield (
                f"recipe.data.augment.crop_padding: {self.crop_padding} around images of {shape[1]}x{shape[2]} gives "
                f"crops without a pixel of the image; use at most {min(shape[1:]) - 1}"
            )

    def prepared(self, fetched: Batch, request: Request) -> Batch:
        """See DeviceTransforms: what was fetched, and what is to be cut from it."""
        if not (self.crop_padding or self.flip) or request.draw is None:
            return fetched
        draws = random.uniform(augmenting_key(request.draw), request.indices, DRAWS)
        return *fetched, places_of(draws, fetched[0].shape, self.crop_padding, self.flip)

    def for_training(self, arrived: Batch, step: int, index: int) -> Batch:
        """Augment, normalise and mix."""
        inputs, targets, *places = arrived
        for each in places:
            inputs = taken(inputs, each, self.crop_padding, self.flip)
        inputs = self._normalised(inputs)
        if self.mixup or self.cutmix:
            key = random.key(random.MIX, self.seed, step, index)
            inputs, targets = mix(inputs, targets, self.classes, self.mixup, self.cutmix, self.mix_probability, key)
        return inputs, targets

    def for_evaluation(self, arrived: Batch) -> Batch:
        """Normalise."""
        inputs, targets = arrived
        return self._normalised(inputs), targets

    def _normalised(self, inputs: Tensor) -> Tensor:
        return inputs if self._constants is None else normalise(inputs, *self._constants)

    @cached_property
    def _constants(self) -> tuple[Tensor, Tensor] | None:
        if self.mean is None or self.std is None:
            return None
        return constants(self.mean, self.std, self.device)


def device_transforms(
    recipe: Mapping[str, Any], facts: Mapping[str, Any], device: torch.device
) -> ImageTransforms | None:
    """Return what a recipe, as plain values, asks to be done to data with these facts; None for nothing.

    UsageError where it cannot be done to such samples.
    """
    augment, mixing = recipe["data"]["augment"], recipe["mix"]
    mean, std = (recipe["data"].get(name) or facts.get(name) for name in ("mean", "std"))
    mixes = mixing["mixup"] or mixing["cutmix"]
    if not (mean or std or augment["crop_padding"] or augment["flip"] or mixes):
        return None
    classes = whole_samples(facts)
    if mixes and classes is None:
        raise UsageError("recipe.mix: there are no labels of whole samples to mix; leave mixup and cutmix out")
    made = ImageTransforms(
        device=device,
        classes=classes or 0,
        seed=recipe["seed"],
        mean=mean,
        std=std,
        crop_padding=augment["crop_padding"],
        flip=augment["flip"],
        mixup=mixing["mixup"],
        cutmix=mixing["cutmix"],
        mix_probability=mixing["probability"],
    )
    made.check(tuple(facts.get("shape", ())))
    return made
