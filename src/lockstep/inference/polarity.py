"""Finds images that look inverted, such as dark on light if a model was trained on images that are light on dark."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from torch import Tensor

_MIDDLE: Final = 0.5  # middle of the brightness range [0, 1]
_MIN_CORNERS: Final = 3  # number of corners that must have the color of the background


class Polarity(NamedTuple):
    """The mean brightness of the training images, in [0, 1], and whether their background is dark."""

    mean: float
    dark_background: bool

    def measure_inverted(self, sample: Tensor) -> float | None:
        """Return the mean brightness of a sample if it looks inverted, or else None.

        `sample` is uint8 of shape [1, height, width]. It looks inverted if it is bright although the training images
        are dark, or the reverse, and if the same holds for the background in at least three of its corners.
        """
        values = sample[0].double() / 255
        brightness = float(values.mean())
        corners = [float(value) for value in values[[0, 0, -1, -1], [0, -1, 0, -1]]]
        inverted_corners = sum((corner > _MIDDLE) == self.dark_background for corner in corners)
        inverted = (brightness > _MIDDLE) == self.dark_background and inverted_corners >= _MIN_CORNERS
        return brightness if inverted else None


def find_polarity(mean: Sequence[float] | None, std: Sequence[float] | None) -> Polarity | None:
    """Return the polarity of single-channel training images, or None if it isn't certain.

    It is certain if the standard deviation is larger than the distance from the mean to black or to white. In this
    case, most pixels are background. Photographs don't meet this condition. A mean and std that no image can have, such
    as 0 and 1, aren't statistics of the data, and are ignored.
    """
    if mean is None or std is None or len(mean) != 1 or len(std) != 1:
        return None
    center, spread = mean[0], std[0]
    if not 0 < center < 1 or spread**2 > center * (1 - center) or spread <= min(center, 1 - center):
        return None
    return Polarity(center, center < _MIDDLE)


def describe_inverted(polarity: Polarity, images: Sequence[tuple[str, float]]) -> str:
    """Return a warning about images that look inverted. `images` contains their paths and mean brightnesses."""
    (first, brightness), more = images[0], len(images) - 1
    kinds = ("dark on light", "light on dark")
    kind, trained = kinds if polarity.dark_background else kinds[::-1]
    others = f" and {more:,} more {'image' if more == 1 else 'images'}" if more else ""
    return (
        f"{first}{others}: {kind} (mean brightness {brightness:.2f}), but the model was trained on images that are "
        f"{trained} (mean {polarity.mean:.2f}); invert {'them' if more else 'it'} first, for example with "
        f"PIL.ImageOps.invert"
    )
