"""The part of an image that the model sees: a random crop in training, the center in validation.

Doesn't import torch.
"""

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

_TRIES: Final = 10
_RATIOS: Final = (3 / 4, 4 / 3)
DRAWS: Final = 2 * _TRIES + 2  # an area and an aspect ratio for each try, then the position


class Box(NamedTuple):
    """A part of an image, in pixels."""

    top: int
    left: int
    height: int
    width: int


def random_crop(height: int, width: int, scale: tuple[float, float], draws: Sequence[float]) -> Box:
    """Choose a crop as torchvision's RandomResizedCrop does (Szegedy et al. 2015, section 6).

    `draws` are DRAWS numbers in [0, 1). The share of the area is uniform in `scale`, and the aspect ratio is
    log-uniform in [3/4, 4/3]. If the crop doesn't fit in the image, the next two draws are tried. After ten tries,
    returns the largest centered part with an allowed aspect ratio.
    """
    for area, aspect in zip(draws[0 : 2 * _TRIES : 2], draws[1 : 2 * _TRIES : 2], strict=True):
        pixels = height * width * (scale[0] + area * (scale[1] - scale[0]))
        ratio = math.exp(math.log(_RATIOS[0]) + aspect * (math.log(_RATIOS[1]) - math.log(_RATIOS[0])))
        crop_height, crop_width = round(math.sqrt(pixels / ratio)), round(math.sqrt(pixels * ratio))
        if 0 < crop_height <= height and 0 < crop_width <= width:
            top, left = int(draws[-2] * (height - crop_height + 1)), int(draws[-1] * (width - crop_width + 1))
            return Box(top, left, crop_height, crop_width)
    return _central_box(height, width)


def _central_box(height: int, width: int) -> Box:
    crop_height, crop_width = height, width
    if width / height < _RATIOS[0]:
        crop_height = round(width / _RATIOS[0])
    elif width / height > _RATIOS[1]:
        crop_width = round(height * _RATIOS[1])
    return Box((height - crop_height) // 2, (width - crop_width) // 2, crop_height, crop_width)


def short_side(height: int, width: int, size: int) -> tuple[int, int]:
    """Return the size with a shorter side of `size` and the same aspect ratio, rounded as by torchvision's Resize."""
    if height < width:
        return size, int(size * width / height)
    return int(size * height / width), size


def centre(height: int, width: int, size: int) -> Box:
    """Return the square of `size` in the center, rounded as torchvision's CenterCrop does."""
    return Box(round((height - size) / 2), round((width - size) / 2), size, size)
