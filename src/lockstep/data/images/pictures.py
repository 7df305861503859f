"""A split of pictures that are read, cut and resized on demand, wherever their bytes are."""

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
    """The location of pictures, and the class of each."""

    targets: Tensor  # int64 of shape [n]

    def name(self, index: int) -> str:
        """Return what errors call a picture, such as its path."""

    def content(self, index: int) -> bytearray:
        """Return the bytes of its file. TrainingError where they cannot be read."""


@dataclass(frozen=True)
class CropSettings:
    """What of a picture the model sees: a random part of the area within `scale`, or where that is None the centre."""

    size: int  # pixels on a side
    resize: int  # the short side, before the centre is cut out
    scale: tuple[float, float] | None
    exif: bool = True  # upright, as the metadata says
    skips: bool = False  # what cannot be decoded comes as zeros that count as nothing


def pictures(train: Pictures, validation: Pictures | None, classes: Sequence[str], request: DataRequest) -> DataSet:
    """Return a dataset of pictures, cut as requested. Validation always sees the centre."""
    cut = crop_settings(request)
    scale = request.resized_crop_scale if request.resized_crop else None
    return DataSet(
        train=PictureSplit(train, replace(cut, scale=scale)),
        validation=None if validation is None else PictureSplit(validation, cut),
        files=(train.name, (validation or train).name),
        skipped=skip_mask,
        facts=facts(classes, (3, cut.size, cut.size), _MEAN, _STD),
    )


def crop_settings(request: DataRequest) -> CropSettings:
    """Return what validation sees of a picture."""
    size = request.image_size or FILES_SIZE
    return CropSettings(size, request.resize_size or size, None, request.exif, request.on_error == "skip")


def as_sample(pixels: Tensor, channels: int, height: int, width: int) -> Tensor:
    """Return a picture, uint8 of shape [3, any, any], as a sample of another shape: uint8 of [channels, height, width].

    One of another size is resized, whatever its aspect. The only channel is Pillow's grey (ITU-R 601-2).
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
    """Pictures as uint8 of shape [n, 3, size, size], and their classes."""

    in_memory: bool = False

    def __init__(self, source: Pictures, cut: CropSettings) -> None:
        self._source = source
        self._cut = cut

    def __len__(self) -> int:
        return len(self._source.targets)

    def name(self, index: int) -> str:
        """Return what errors call a picture, such as its path."""
        return self._source.name(index)

    def target(self, index: int) -> int:
        """Return the class of a picture."""
        return int(self._source.targets[index])

    def picture(self, index: int) -> Tensor | None:
        """Return a whole picture, uint8 of shape [3, any, any]; None for a corrupt one that is to be skipped."""
        try:
            return decode(self._source.content(index), self._cut.exif)
        except UndecodableError as error:
            if self._cut.skips:
                return None
            raise DataError(
                f"{self._source.name(index)}: cannot be read as an image: {error}; convert or remove it, or set "
                f"recipe.data.on_error=skip"
            ) from error

    def fetch(self, indices: NDArray[np.int64], draw: int | None) -> tuple[Tensor, Tensor]:
        images = torch.empty(len(indices), 3, self._cut.size, self._cut.size, dtype=torch.uint8)
        targets = self._source.targets[torch.tensor(indices)]
        draws = self._draws(indices, draw)
        for place, index in enumerate(indices.tolist()):
            whole = self.picture(index)
            if whole is None:
                targets[place] = SKIPPED
                images[place] = 0
            else:
                images[place] = part(whole, self._cut, draws[place] if draws else None)
        return images, targets

    def _draws(self, indices: NDArray[np.int64], draw: int | None) -> list[list[float]] | None:
        if draw is None or self._cut.scale is None:
            return None
        drawn: list[list[float]] = random.uniform(random.key(random.AUGMENT, draw), indices, DRAWS).tolist()
        return drawn


def part(pixels: Tensor, cut: CropSettings, draws: Sequence[float] | None = None) -> Tensor:
    """Return what the model sees of a picture: uint8 of shape [3, size, size], by `draws` or else the centre."""
    _, height, width = pixels.shape
    if draws is None or cut.scale is None:
        high, wide = short_side(height, width, cut.resize)
        top, left, _, _ = centre(high, wide, cut.size)
        return resize(pixels, high, wide)[:, top : top + cut.size, left : left + cut.size]
    top, left, high, wide = random_crop(height, width, cut.scale, draws)
    return resize(pixels[:, top : top + high, left : left + wide], cut.size, cut.size)


def resize(pixels: Tensor, height: int, width: int) -> Tensor:
    """Return a picture, uint8 of shape [3, any, any], in another size, by averages where it shrinks."""
    # On bytes with interleaved channels, as here, torch counts in whole numbers: in half Pillow's time, off
    # by at most one from it, with the same bits for AVX2, AVX-512 and any number of threads (not without AVX2).
    return F.interpolate(pixels[None], (height, width), mode="bilinear", antialias=True)[0]
