"""A split of images that are decoded, cropped and resized on demand. The encoded images come from any source."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol, final

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from lockstep.core import random
from lockstep.data.base import DataSet
from lockstep.data.images.crops import DRAWS, center, random_crop, short_side
from lockstep.data.images.decoding import UndecodableError, decode
from lockstep.data.request import FILES_SIZE, DataRequest
from lockstep.errors import DataError
from lockstep.tasks.classification import SKIPPED, skip_mask
from lockstep.tasks.facts import facts

_MEAN: Final = (0.485, 0.456, 0.406)  # the mean of each channel in ImageNet
_STD: Final = (0.229, 0.224, 0.225)  # the standard deviation of each channel in ImageNet


class Pictures(Protocol):
    """A source of encoded images with their classes."""

    targets: Tensor  # int64 of shape [n]

    def name(self, index: int) -> str:
        """Return the name of an image in errors, such as its path."""

    def content(self, index: int) -> bytearray:
        """Return the content of an image file. Raises TrainingError if it can't be read."""


@dataclass(frozen=True)
class CropSettings:
    """The settings of crops: random crops, or center crops if `scale` is None.

    `scale` is the range of the area of a random crop, as a fraction of the image.
    """

    size: int  # the side length of the crop in pixels
    resize: int  # the length of the short side before a center crop
    scale: tuple[float, float] | None
    exif: bool = True  # whether to apply the orientation from the metadata
    skips: bool = False  # whether to return zeros with the target SKIPPED for images that can't be decoded


def pictures(train: Pictures, validation: Pictures | None, classes: Sequence[str], request: DataRequest) -> DataSet:
    """Return a dataset of images with the requested crops. Validation always uses center crops."""
    settings = crop_settings(request)
    scale = request.resized_crop_scale if request.resized_crop else None
    return DataSet(
        train=PictureSplit(train, replace(settings, scale=scale)),
        validation=None if validation is None else PictureSplit(validation, settings),
        files=(train.name, (validation or train).name),
        skipped=skip_mask,
        facts=facts(classes, (3, settings.size, settings.size), _MEAN, _STD),
    )


def crop_settings(request: DataRequest) -> CropSettings:
    """Return the crop settings for validation."""
    size = request.image_size or FILES_SIZE
    return CropSettings(size, request.resize_size or size, None, request.exif, request.on_error == "skip")


def as_sample(pixels: Tensor, channels: int, height: int, width: int) -> Tensor:
    """Convert an RGB image, uint8 of shape [3, any, any], to a sample, uint8 of shape [channels, height, width].

    If the size differs, the image is resized without keeping its aspect ratio. For a single channel, the image is
    converted to grayscale as in Pillow (ITU-R 601-2).
    """
    if pixels.shape[1:] != (height, width):
        pixels = resize(pixels, height, width)
    if channels == 3:
        return pixels
    red, green, blue = pixels.to(torch.int32)
    gray: Tensor = (red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16
    return gray.to(torch.uint8)[None]


@final
class PictureSplit:
    """A split with images, uint8 of shape [n, 3, size, size], and their classes."""

    in_memory: bool = False

    def __init__(self, source: Pictures, settings: CropSettings) -> None:
        self._source = source
        self._settings = settings

    def __len__(self) -> int:
        return len(self._source.targets)

    def name(self, index: int) -> str:
        """Return the name of an image in errors, such as its path."""
        return self._source.name(index)

    def target(self, index: int) -> int:
        """Return the class of an image."""
        return int(self._source.targets[index])

    def picture(self, index: int) -> Tensor | None:
        """Return an image without cropping, uint8 of shape [3, any, any].

        If the image is damaged, returns None if the recipe skips damaged images. Otherwise, raises DataError with the
        name of the file.
        """
        try:
            return decode(self._source.content(index), self._settings.exif)
        except UndecodableError as error:
            if self._settings.skips:
                return None
            raise DataError(
                f"{self._source.name(index)}: cannot be read as an image: {error}; convert or remove it, or set "
                f"recipe.data.on_error=skip"
            ) from error

    def fetch(self, indices: NDArray[np.int64], draw: int | None) -> tuple[Tensor, Tensor]:
        images = torch.empty(len(indices), 3, self._settings.size, self._settings.size, dtype=torch.uint8)
        targets = self._source.targets[torch.tensor(indices)]
        draws = self._draws(indices, draw)
        for row, index in enumerate(indices.tolist()):
            pixels = self.picture(index)
            if pixels is None:
                targets[row] = SKIPPED
                images[row] = 0
            else:
                images[row] = part(pixels, self._settings, draws[row] if draws else None)
        return images, targets

    def _draws(self, indices: NDArray[np.int64], draw: int | None) -> list[list[float]] | None:
        if draw is None or self._settings.scale is None:
            return None
        values: list[list[float]] = random.uniform(random.key(random.AUGMENT, draw), indices, DRAWS).tolist()
        return values


def part(pixels: Tensor, settings: CropSettings, draws: Sequence[float] | None = None) -> Tensor:
    """Return a crop of an image, uint8 of shape [3, size, size].

    `draws` are the random numbers of a random crop. If they are None, returns the center crop.
    """
    _, height, width = pixels.shape
    if draws is None or settings.scale is None:
        rows, columns = short_side(height, width, settings.resize)
        top, left, _, _ = center(rows, columns, settings.size)
        return resize(pixels, rows, columns)[:, top : top + settings.size, left : left + settings.size]
    top, left, rows, columns = random_crop(height, width, settings.scale, draws)
    return resize(pixels[:, top : top + rows, left : left + columns], settings.size, settings.size)


def resize(pixels: Tensor, height: int, width: int) -> Tensor:
    """Resize an image, uint8 of shape [3, any, any], with bilinear interpolation and antialiasing."""
    # For uint8 with channels last in memory, torch uses integer arithmetic. It takes half the time of Pillow, and the
    # pixels differ by at most 1. The bits don't depend on the number of threads. They are the same with AVX2 and
    # AVX-512, but not without AVX2.
    return F.interpolate(pixels[None], (height, width), mode="bilinear", antialias=True)[0]
