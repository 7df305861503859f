"""Computes crop boxes for images: random crops for training, and center crops for validation.

This module doesn't import torch.
"""

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

_TRIES: Final = 10
_RATIOS: Final = (3 / 4, 4 / 3)
NUM_DRAWS: Final = 2 * _TRIES + 2  # random numbers per crop: area and aspect ratio for each try, and the position


class Box(NamedTuple):
    """A rectangle in an image, in pixels."""

    top: int
    left: int
    height: int
    width: int


def compute_random_crop_box(height: int, width: int, scale: tuple[float, float], draws: Sequence[float]) -> Box:
    """Return a random crop box as in torchvision's RandomResizedCrop (Szegedy et al. 2015, section 6).

    `draws` contains NUM_DRAWS random numbers in [0, 1). The area of the crop, as a fraction of the image, is uniformly
    distributed in `scale`. Its aspect ratio is log-uniform in [3/4, 4/3]. If the crop doesn't fit into the image, the
    next two draws are tried. After ten tries, returns the largest center crop with an allowed aspect ratio.
    """
    for area, aspect in zip(draws[0 : 2 * _TRIES : 2], draws[1 : 2 * _TRIES : 2], strict=True):
        pixels = height * width * (scale[0] + area * (scale[1] - scale[0]))
        ratio = math.exp(math.log(_RATIOS[0]) + aspect * (math.log(_RATIOS[1]) - math.log(_RATIOS[0])))
        crop_height, crop_width = round(math.sqrt(pixels / ratio)), round(math.sqrt(pixels * ratio))
        if 0 < crop_height <= height and 0 < crop_width <= width:
            top, left = int(draws[-2] * (height - crop_height + 1)), int(draws[-1] * (width - crop_width + 1))
            return Box(top, left, crop_height, crop_width)
    return _fit_center_box(height, width)


def _fit_center_box(height: int, width: int) -> Box:
    crop_height, crop_width = height, width
    if width / height < _RATIOS[0]:
        crop_height = round(width / _RATIOS[0])
    elif width / height > _RATIOS[1]:
        crop_width = round(height * _RATIOS[1])
    return Box((height - crop_height) // 2, (width - crop_width) // 2, crop_height, crop_width)


def compute_resized_shape(height: int, width: int, size: int) -> tuple[int, int]:
    """Return the height and width after resizing the short side to `size`, rounded as in torchvision's Resize."""
    if height < width:
        return size, int(size * width / height)
    return int(size * height / width), size


def compute_center_crop_box(height: int, width: int, size: int) -> Box:
    """Return the box of the center crop with `size` x `size` pixels, rounded as in torchvision's CenterCrop."""
    return Box(round((height - size) / 2), round((width - size) / 2), size, size)
