"""A split of images that are read, cropped and resized on demand, from any source of bytes."""

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
from lockstep.data.images.crops import DRAWS, centre, random_crop, short_side
from lockstep.data.images.decoding import UndecodableError, decode
from lockstep.data.request import FILES_SIZE, DataRequest
from lockstep.errors import DataError
from lockstep.tasks.classification import SKIPPED, skip_mask
from lockstep.tasks.facts import facts

_MEAN: Final = (0.485, 0.456, 0.406)  # of ImageNet
_STD: Final = (0.229, 0.224, 0.225)


class Pictures(Protocol):
    """A source of encoded images, and the class of each image."""

    targets: Tensor  # int64 of shape [n]

    def name(self, index: int) -> str:
        """Return the name of an image in errors, such as its path."""

    def content(self, index: int) -> bytearray:
        """Return the bytes of an image file. Raises TrainingError if they can't be read."""


@dataclass(frozen=True)
class CropSettings:
    """The part of an image that the model sees: a random crop, or the center if `scale` is None.

    `scale` is the range of the crop's share of the area.
    """

    size: int  # the side length in pixels
    resize: int  # the shorter side before the center crop
    scale: tuple[float, float] | None
    exif: bool = True  # whether to apply the orientation from the metadata
    skips: bool = False  # whether to return undecodable images as zeros that don't count


def pictures(train: Pictures, validation: Pictures | None, classes: Sequence[str], request: DataRequest) -> DataSet:
    """Return a dataset of images, cropped as requested. Validation always uses the center."""
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
    """Return the crop settings of validation."""
    size = request.image_size or FILES_SIZE
    return CropSettings(size, request.resize_size or size, None, request.exif, request.on_error == "skip")


def as_sample(pixels: Tensor, channels: int, height: int, width: int) -> Tensor:
    """Return an image, uint8 of shape [3, any, any], as a sample: uint8 of shape [channels, height, width].

    If the size differs, the image is resized without keeping its aspect ratio. A single channel is Pillow's grayscale
    (ITU-R 601-2).
    """
    if pixels.shape[1:] != (height, width):
        pixels = resize(pixels, height, width)
    if channels == 3:
        return pixels
    red, green, blue = pixels.to(torch.int32)
    grey: Tensor = (red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16
    return grey.to(torch.uint8)[None]


@final
class PictureSplit:
    """Images as uint8 of shape [n, 3, size, size], and their classes."""

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
        """Return a whole image, uint8 of shape [3, any, any], or None if it is damaged and the recipe skips it.

        Raises DataError with the name of the file if it is damaged and the recipe doesn't skip it.
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
    """Return the part that the model sees as uint8 of shape [3, size, size].

    Returns the crop that `draws` select, or the center without them.
    """
    _, height, width = pixels.shape
    if draws is None or settings.scale is None:
        rows, columns = short_side(height, width, settings.resize)
        top, left, _, _ = centre(rows, columns, settings.size)
        return resize(pixels, rows, columns)[:, top : top + settings.size, left : left + settings.size]
    top, left, rows, columns = random_crop(height, width, settings.scale, draws)
    return resize(pixels[:, top : top + rows, left : left + columns], settings.size, settings.size)


def resize(pixels: Tensor, height: int, width: int) -> Tensor:
    """Return an image, uint8 of shape [3, any, any], in a different size, antialiased when it shrinks."""
    # For bytes with interleaved channels, as here, torch uses integer arithmetic. It takes half of Pillow's time, and
    # pixels differ by at most one. The bits are the same with AVX2, AVX-512 and any number of threads, but not without
    # AVX2.
    return F.interpolate(pixels[None], (height, width), mode="bilinear", antialias=True)[0]
