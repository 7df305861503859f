"""Augments, normalizes and mixes the samples of a batch on its device.

Random numbers are drawn separately for each sample, so its augmentation doesn't depend on the rest of the batch.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from lockstep.core import random
from lockstep.core.batch import Batch
from lockstep.data.base import Request
from lockstep.errors import UsageError
from lockstep.tasks.dataset_properties import count_sample_classes

_DRAWS: Final = 3  # random numbers per sample: row, column, flip
_MIN_LOOP_SIZE: Final = 1 << 16  # number of values per image from which a loop flips images faster on a CPU
_MIN_CHUNKED_SIZE: Final = 1 << 22  # number of values from which a float32 batch exceeds the CPU cache
_CHUNK_SIZE: Final = 1 << 19  # number of values in each chunk of such a batch


@dataclass(frozen=True)
class ImageTransforms:
    """Transforms batches of (inputs, targets) on the device. If `mean` is None, inputs aren't normalized."""

    num_classes: int
    seed: int = 0
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    crop_padding: int = 0
    flip: bool = False
    mixup: float = 0.0
    cutmix: float = 0.0
    mix_probability: float = 1.0

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Raise UsageError if samples of `shape` don't support these transforms."""
        if errors := list(self._find_unsupported_settings(shape)):
            raise UsageError("\n".join(errors))

    def _find_unsupported_settings(self, shape: tuple[int, ...]) -> Iterator[str]:
        is_image = len(shape) == 3
        if not is_image and (self.crop_padding or self.flip):
            yield (
                f"recipe.data.augment: crop_padding and flip require images, got samples of shape {shape}; remove "
                f"crop_padding and flip"
            )
        for name, values, other_name, other_values in (
            ("mean", self.mean, "std", self.std),
            ("std", self.std, "mean", self.mean),
        ):
            if values is None:
                continue
            if other_values is None:
                yield f"recipe.data.{name}: set without {other_name}, which has no default here; set both, or neither"
            elif not is_image:
                yield f"recipe.data.{name}: requires images, got samples of shape {shape}; remove it"
            elif len(values) != shape[0]:
                yield f"recipe.data.{name}: {len(values)} values for {shape[0]} channels; set one value per channel"
        if is_image and self.crop_padding >= min(shape[1:]):
            yield (
                f"recipe.data.augment.crop_padding: {self.crop_padding} is too large for images of "
                f"{shape[1]}x{shape[2]}, since a crop could contain only padding; use at most {min(shape[1:]) - 1}"
            )

    def prepare(self, batch: Batch, request: Request) -> Batch:
        """See DeviceTransforms. Adds the crop positions for `crop_and_flip` to the batch."""
        if not (self.crop_padding or self.flip) or request.random_key is None:
            return batch
        draws = random.draw_uniform(random.make_key(random.AUGMENT, request.random_key, 1), request.indices, _DRAWS)
        return *batch, compute_crop_positions(draws, batch[0].shape, self.crop_padding, self.flip)

    def transform_training_batch(self, batch: Batch, step: int, index: int) -> Batch:
        """See DeviceTransforms. Augments, normalizes and mixes the batch.

        Raises UsageError if images would be moved, but not their targets. A run finds this before it starts, because it
        transforms a few samples first.
        """
        inputs, targets, *positions = batch
        if (self.crop_padding or self.flip) and targets.ndim > 2:
            raise UsageError(
                f"recipe.data.augment: crop_padding and flip would move the images, but not their targets, which have "
                f"shape {tuple(targets.shape[1:])}, such as masks; remove crop_padding and flip, and augment both "
                f"together in your dataset"
            )
        for position in positions:
            inputs = crop_and_flip(inputs, position, self.crop_padding, self.flip)
        inputs = self._normalize_inputs(inputs)
        if self.mixup or self.cutmix:
            key = random.make_key(random.MIX, self.seed, step, index)
            inputs, targets = mix_samples(
                inputs, targets, self.num_classes, self.mixup, self.cutmix, self.mix_probability, key
            )
        return inputs, targets

    def transform_evaluation_batch(self, batch: Batch) -> Batch:
        """See DeviceTransforms. Only normalizes the batch."""
        inputs, targets = batch
        return self._normalize_inputs(inputs), targets

    def _normalize_inputs(self, inputs: Tensor) -> Tensor:
        if self.mean is None or self.std is None:
            return inputs
        key = inputs.device, 1.0 if inputs.is_floating_point() else 255.0
        if key not in self._constants:
            self._constants[key] = compute_normalization_constants(self.mean, self.std, *key)
        return normalize(inputs, *self._constants[key])

    @cached_property
    def _constants(self) -> dict[tuple[torch.device, float], tuple[Tensor, Tensor]]:
        return {}


def make_device_transforms(recipe: Mapping[str, Any], dataset_info: Mapping[str, Any]) -> ImageTransforms | None:
    """Return the device transforms for a recipe and a dataset, or None if there are no transforms.

    `recipe` is the recipe as plain values, and `dataset_info` contains the dataset properties. Raises UsageError if the
    samples don't support the transforms.
    """
    augment, mixing = recipe["data"]["augment"], recipe["mix"]
    mean, std = (recipe["data"].get(name) or dataset_info.get(name) for name in ("mean", "std"))
    mixes = mixing["mixup"] or mixing["cutmix"]
    if not (mean or std or augment["crop_padding"] or augment["flip"] or mixes):
        return None
    classes = count_sample_classes(dataset_info)
    if mixes and classes is None:
        raise UsageError("recipe.mix: mixup and cutmix require a class for each sample; remove mixup and cutmix")
    transforms = ImageTransforms(
        num_classes=classes or 0,
        seed=recipe["seed"],
        mean=mean,
        std=std,
        crop_padding=augment["crop_padding"],
        flip=augment["flip"],
        mixup=mixing["mixup"],
        cutmix=mixing["cutmix"],
        mix_probability=mixing["probability"],
    )
    transforms.check_shape(tuple(dataset_info.get("shape", ())))
    return transforms


def compute_crop_positions(draws: NDArray[np.float64], shape: Sequence[int], crop_padding: int, flip: bool) -> Tensor:
    """Compute the positions of random crops and flips for `crop_and_flip`, as an int64 tensor on the CPU.

    Images of `shape` [n, channels, height, width] are padded with zeros by `crop_padding` pixels on each side, and then
    cropped to their original size. `draws` has shape [n, 3], with uniform random numbers in [0, 1) for row, column and
    flip. The result has shape [n] without padding, and [n * channels] with padding.
    """
    count, channels, height, width = shape
    flipped = (draws[:, 2] < 0.5) & flip
    sources = np.arange(count) + count * flipped
    if not crop_padding:
        return torch.from_numpy(sources)
    tops, lefts = (draws[:, :2] * (2 * crop_padding + 1)).astype(np.int64).T
    lefts = np.where(flipped, 2 * crop_padding - lefts, lefts)
    size = (height + 2 * crop_padding, width + 2 * crop_padding)
    return torch.from_numpy(_compute_plane_offsets(sources * channels, channels, tops, lefts, size))


def crop_and_flip(images: Tensor, positions: Tensor, crop_padding: int, flip: bool) -> Tensor:
    """Crop and flip images on their device. `positions` is the result of `compute_crop_positions`."""
    height, width = images.shape[2:]
    if images.device.type == "cpu" and not crop_padding and images[:1].numel() >= _MIN_LOOP_SIZE:
        return _flip_each(images, positions)
    padded = F.pad(images, (crop_padding,) * 4) if crop_padding else images
    # Gather full rows from the concatenation of the original and the flipped images. This is ten times faster than
    # gathering individual pixels.
    sources = torch.cat([padded, padded.flip(3)]) if flip else padded
    if not crop_padding:
        return sources.index_select(0, positions)
    row_offsets = torch.arange(0, height * padded.shape[3], padded.shape[3], device=images.device)
    rows = (positions[:, None] + row_offsets).flatten()
    return sources.flatten().unfold(0, width, 1).index_select(0, rows).view(images.shape)


def _flip_each(images: Tensor, positions: Tensor) -> Tensor:
    """Return the images at `positions`. Positions from n on refer to the flipped images.

    For large images on a CPU, this is faster than gathering from a concatenation.
    """
    count = len(images)
    result = torch.empty_like(images, memory_format=torch.contiguous_format)
    for row, position in enumerate(positions.tolist()):
        result[row] = images[position] if position < count else images[position - count].flip(2)
    return result


def compute_normalization_constants(
    mean: Sequence[float], std: Sequence[float], device: torch.device, white: float = 255.0
) -> tuple[Tensor, Tensor]:
    """Return the scale and the shift for `normalize`, as float32 tensors of shape [channels, 1, 1].

    `white` is the maximum value of a pixel: 255 for uint8 images, and 1 for float images.
    """
    scale = torch.tensor([1.0 / (white * s) for s in std], device=device)[:, None, None]
    shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)], device=device)[:, None, None]
    return scale, shift


def normalize(images: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Return (images / white - mean) / std per channel, in float32. Doesn't modify `images`.

    `scale` and `shift` are the results of `compute_normalization_constants`.
    """
    # Use two operations that round separately. A fused multiply-add would return different bits.
    if images.device.type != "cpu" or images.numel() < _MIN_CHUNKED_SIZE:
        return images.to(torch.float32, copy=True).mul_(scale).add_(shift)
    # On a CPU, normalize the batch in chunks that fit in the cache.
    normalized = torch.empty_like(images, dtype=torch.float32)
    count = max(_CHUNK_SIZE // images[0].numel(), 1)
    for start in range(0, len(images), count):
        chunk = slice(start, start + count)
        normalized[chunk].copy_(images[chunk]).mul_(scale).add_(shift)
    return normalized


def mix_samples(
    inputs: Tensor, targets: Tensor, num_classes: int, mixup: float, cutmix: float, probability: float, key: int
) -> tuple[Tensor, Tensor]:
    """Mix each sample with its neighbor in the micro-batch. Return inputs and class weights of shape [n, num_classes].

    Mixup (Zhang et al. 2018) blends two samples with lambda ~ Beta(mixup, mixup). CutMix (Yun et al. 2019) pastes a box
    with a relative area of 1 - lambda, and then adjusts lambda to the actual box. If both are enabled, each of them is
    used with probability 1/2. With probability 1 - `probability`, the inputs are returned unchanged. All random numbers
    depend only on `key`.
    """
    generator = np.random.Generator(np.random.Philox(key=key))
    # Don't use F.one_hot, which synchronizes with the device to check the targets. The row of a skipped sample is zero.
    weights = (targets[:, None] == torch.arange(num_classes, device=targets.device)).float()
    is_mixed, prefers_cutmix = generator.random() < probability, generator.random() < 0.5
    uses_cutmix = cutmix > 0 and (mixup == 0 or prefers_cutmix)
    beta = cutmix if uses_cutmix else mixup
    if not is_mixed or beta == 0:
        return inputs, weights
    share = float(generator.beta(beta, beta))
    if uses_cutmix:
        inputs, share = _paste_box(inputs, share, generator)
    else:
        inputs = inputs * share + inputs.roll(1, 0) * (1.0 - share)
    return inputs, weights * share + weights.roll(1, 0) * (1.0 - share)


def _compute_plane_offsets(
    planes: NDArray[np.int64], channels: int, tops: NDArray[np.int64], lefts: NDArray[np.int64], size: Sequence[int]
) -> NDArray[np.int64]:
    """Return the offset of each cropped plane in the flattened tensor. A plane is a channel of an image.

    `planes` contains the index of the first plane of each image. `size` is the height and width of a padded plane.
    """
    numbers = planes[:, None] + np.arange(channels)
    return ((numbers * size[0] + tops[:, None]) * size[1] + lefts[:, None]).ravel()


def _paste_box(inputs: Tensor, lam: float, generator: np.random.Generator) -> tuple[Tensor, float]:
    height, width = inputs.shape[-2:]
    side = (1.0 - lam) ** 0.5
    top, bottom = _draw_span(height, side, generator)
    left, right = _draw_span(width, side, generator)
    mixed = inputs.clone()
    mixed[..., top:bottom, left:right] = inputs.roll(1, 0)[..., top:bottom, left:right]
    return mixed, 1.0 - (bottom - top) * (right - left) / (height * width)


def _draw_span(length: int, relative_size: float, generator: np.random.Generator) -> tuple[int, int]:
    center, half = generator.integers(length), int(length * relative_size) // 2
    return max(int(center) - half, 0), min(int(center) + half, length)
