"""Which part of an image is seen: a random share of it in training, the centre in validation. No torch."""

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

_TRIES: Final = 10
_RATIOS: Final = (3 / 4, 4 / 3)
DRAWS: Final = 2 * _TRIES + 2  # an area and an aspect for each try, then the place


class Box(NamedTuple):
    """A part of an image, in whole pixels."""

    top: int
    left: int
    height: int
    width: int


def random_crop(height: int, width: int, scale: tuple[float, float], draws: Sequence[float]) -> Box:
    """Choose as torchvision's RandomResizedCrop does (Szegedy et al. 2015, section 6), from DRAWS numbers in [0, 1).

    The area's share is uniform in `scale`, the aspect log-uniform in [3/4, 4/3]; what does not fit in the image
    is drawn again, and after ten tries it is the largest centre part of an allowed aspect.
    """
    for area, aspect in zip(draws[0 : 2 * _TRIES : 2], draws[1 : 2 * _TRIES : 2], strict=True):
        pixels = height * width * (scale[0] + area * (scale[1] - scale[0]))
        ratio = math.exp(math.log(_RATIOS[0]) + aspect * (math.log(_RATIOS[1]) - math.log(_RATIOS[0])))
        high, wide = round(math.sqrt(pixels / ratio)), round(math.sqrt(pixels * ratio))
        if 0 < high <= height and 0 < wide <= width:
            top, left = int(draws[-2] * (height - high + 1)), int(draws[-1] * (width - wide + 1))
            return Box(top, left, high, wide)
    return _central_box(height, width)


def _central_box(height: int, width: int) -> Box:
    high, wide = height, width
    if width / height < _RATIOS[0]:
        high = round(width / _RATIOS[0])
    elif width / height > _RATIOS[1]:
        wide = round(height * _RATIOS[1])
    return Box((height - high) // 2, (width - wide) // 2, high, wide)


def short_side(height: int, width: int, size: int) -> tuple[int, int]:
    """Return the height and width whose shorter one is `size`, the aspect kept, as torchvision's Resize rounds."""
    if height < width:
        return size, int(size * width / height)
    return int(size * height / width), size


def centre(height: int, width: int, size: int) -> Box:
    """Return the square of `size` in the middle, as torchvision's CenterCrop rounds."""
    return Box(round((height - size) / 2), round((width - size) / 2), size, size)
