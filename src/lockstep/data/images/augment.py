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

DRAWS = 3  # row, column, flip


def augment(images: Tensor, draws: NDArray[np.float64], crop_padding: int, flip: bool) -> Tensor:
    """Crop each image back to size after padding it with zeros, and flip each second one left to right.

    `images` is [n, channels, height, width], `draws` uniform in [0, 1) of shape [n, DRAWS].
    """
    places = places_of(draws, images.shape, crop_padding, flip)
    return taken(images, places.to(images.device), crop_padding, flip)


def places_of(draws: NDArray[np.float64], shape: Sequence[int], crop_padding: int, flip: bool) -> Tensor:
    """Return what `augment` takes from images of `shape`, as it follows from the draws, for `taken`: int64, on the CPU.

    Worked out beforehand, so that it can travel to the device together with the images.
    """
    count, channels, height, width = shape
    flipped = (draws[:, 2] < 0.5) & flip
    sources = np.arange(count) + count * flipped
    if not crop_padding:
        return torch.from_numpy(sources)
    tops, lefts = (draws[:, :2] * (2 * crop_padding + 1)).astype(np.int64).T
    lefts = np.where(flipped, 2 * crop_padding - lefts, lefts)
    size = (height + 2 * crop_padding, width + 2 * crop_padding)
    return torch.from_numpy(_first_places(sources * channels, channels, tops, lefts, size))


def taken(images: Tensor, places: Tensor, crop_padding: int, flip: bool) -> Tensor:
    """Return images cut and flipped as `places` says, on their device."""
    height, width = images.shape[2:]
    padded = F.pad(images, (crop_padding,) * 4) if crop_padding else images
    # Each image twice, as it is and flipped, because whole rows are copied ten times faster than pixels are gathered.
    both = torch.cat([padded, padded.flip(3)]) if flip else padded
    if not crop_padding:
        return both.index_select(0, places)
    below = torch.arange(0, height * padded.shape[3], padded.shape[3], device=images.device)
    rows = (places[:, None] + below).flatten()
    return both.flatten().unfold(0, width, 1).index_select(0, rows).view(images.shape)


def constants(mean: Sequence[float], std: Sequence[float], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return what `normalise` multiplies by and what it adds: float32 of shape [channels, 1, 1]."""
    scale = torch.tensor([1.0 / (255.0 * s) for s in std], device=device)[:, None, None]
    shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)], device=device)[:, None, None]
    return scale, shift


def normalise(images: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Return (images / 255 - mean) / std for each channel, in float32; `constants` gives `scale` and `shift`."""
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


def _first_places(
    planes: NDArray[np.int64], channels: int, tops: NDArray[np.int64], lefts: NDArray[np.int64], size: Sequence[int]
) -> NDArray[np.int64]:
    """Return where each cut plane begins in the flat tensor: planes are numbered, `size` is theirs before the cut."""
    numbers = planes[:, None] + np.arange(channels)
    return ((numbers * size[0] + tops[:, None]) * size[1] + lefts[:, None]).ravel()


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
    # Not by F.one_hot, which looks at the targets first. SKIPPED is no class's number, so its row is zeros.
    return (targets[:, None] == torch.arange(classes, device=targets.device)).float()
