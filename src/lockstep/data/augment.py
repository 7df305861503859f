"""Images on their way into the model, a batch at a time on its device: crop, flip, normalise, mix.

Every sample has random numbers of its own, so the picture it becomes does not depend on which others are in its batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from lockstep.core import random
from lockstep.data.base import SKIPPED

DRAWS = 3  # row, column, flip


def augment(images: Tensor, draws: NDArray[np.float64], crop_padding: int, flip: bool) -> Tensor:
    """Crop each image back to size after padding it with zeros, and flip each second one left to right.

    `images` is [n, channels, height, width], `draws` uniform in [0, 1) of shape [n, DRAWS].
    """
    height, width = images.shape[-2:]
    offsets = torch.from_numpy((draws[:, :2] * (2 * crop_padding + 1)).astype(np.int64)).to(images.device)
    flipped = torch.from_numpy(draws[:, 2] < 0.5).to(images.device) & flip
    across = torch.arange(width, device=images.device)
    columns = torch.where(flipped[:, None], across.flip(0), across) + offsets[:, 1:]
    rows = torch.arange(height, device=images.device) + offsets[:, :1]
    padded = F.pad(images, (crop_padding,) * 4) if crop_padding else images
    places = (rows * padded.shape[-1])[:, :, None] + columns[:, None, :]
    places = places.view(len(images), 1, -1).expand(-1, images.shape[1], -1)
    return padded.flatten(2).gather(2, places).view_as(images)


def normalise(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Return (images / 255 - mean) / std for each channel, in float32."""
    scale = torch.tensor([1.0 / (255.0 * s) for s in std], device=images.device)[:, None, None]
    shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)], device=images.device)[:, None, None]
    # Two roundings, never one: a fused multiply-add would give other bits where it is used.
    return images.to(torch.float32).mul_(scale).add_(shift)


def mix(
    inputs: Tensor, targets: Tensor, classes: int, mixup: float, cutmix: float, probability: float, key: int
) -> tuple[Tensor, Tensor]:
    """Mix each sample with its neighbour in the micro-batch; return inputs and the weights of classes, [n, classes].

    Mixup (Zhang et al. 2018) blends by lambda ~ Beta(mixup, mixup); cutmix (Yun et al. 2019) pastes a box of area
    1 - lambda and corrects lambda to the box as cut. With both, each has probability 1/2. All draws follow from `key`.
    """
    generator = np.random.Generator(np.random.Philox(key=key))
    weights = _one_hot(targets, classes)
    acts, second = generator.random() < probability, generator.random() < 0.5
    cuts = cutmix > 0 and (mixup == 0 or second)
    beta = cutmix if cuts else mixup
    if not acts or beta == 0:
        return inputs, weights
    share = float(generator.beta(beta, beta))
    if cuts:
        inputs, share = _cut(inputs, share, generator)
    else:
        inputs = inputs * share + inputs.roll(1, 0) * (1.0 - share)
    return inputs, weights * share + weights.roll(1, 0) * (1.0 - share)


def augmenting_key(draw: int) -> int:
    """Return the key of an epoch's draws for `augment`."""
    return random.key(random.AUGMENT, draw, 1)


def _cut(inputs: Tensor, share: float, generator: np.random.Generator) -> tuple[Tensor, float]:
    height, width = inputs.shape[-2:]
    side = (1.0 - share) ** 0.5
    top, bottom = _span(height, side, generator)
    left, right = _span(width, side, generator)
    mixed = inputs.clone()
    mixed[..., top:bottom, left:right] = inputs.roll(1, 0)[..., top:bottom, left:right]
    return mixed, 1.0 - (bottom - top) * (right - left) / (height * width)


def _span(length: int, side: float, generator: np.random.Generator) -> tuple[int, int]:
    centre, half = generator.integers(length), int(length * side) // 2
    return max(int(centre) - half, 0), min(int(centre) + half, length)


def _one_hot(targets: Tensor, classes: int) -> Tensor:
    counted = targets != SKIPPED
    return F.one_hot(targets.clamp(min=0), classes).float() * counted[:, None]
