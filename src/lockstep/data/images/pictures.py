"""A split of pictures that are read, cut and resized when they are asked for, wherever their bytes are."""

from __future__ import annotations

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
from lockstep.errors import TrainingError
from lockstep.tasks.classification import SKIPPED, skipped_samples
from lockstep.tasks.facts import facts

_MEAN: Final = (0.485, 0.456, 0.406)  # of ImageNet
_STD: Final = (0.229, 0.224, 0.225)


class Pictures(Protocol):
    """The location of pictures, and the class of each."""

    targets: Tensor  # int64 of shape [n]

    def name(self, index: int) -> str:
        """Return what errors call a picture, such as its path."""
        ...

    def content(self, index: int) -> bytearray:
        """Return the bytes of its file. TrainingError where they cannot be read."""
        ...


@dataclass(frozen=True)
class Cut:
    """What of a picture the model sees: a random part of the area within `scale`, or where that is None the centre."""

    size: int  # pixels on a side
    resize: int  # the short side, before the centre is cut out
    scale: tuple[float, float] | None
    exif: bool = True  # upright, as the metadata says
    skips: bool = False  # what cannot be decoded comes as zeros that count as nothing


def pictures(train: Pictures, validation: Pictures | None, classes: Sequence[str], asked: DataRequest) -> DataSet:
    """Return a data set of pictures, cut as is asked. Validation always sees the centre."""
    cut = cut_of(asked)
    scale = asked.resized_crop_scale if asked.resized_crop else None
    splits = [PictureSplit(train, replace(cut, scale=scale))]
    if validation is not None:
        splits.append(PictureSplit(validation, cut))
    return DataSet(
        train=splits[0],
        validation=splits[1] if validation is not None else None,
        files=(train.name, (validation or train).name),
        skipped=skipped_samples,
        facts=facts(classes, (3, cut.size, cut.size), _MEAN, _STD),
    )


def cut_of(asked: DataRequest) -> Cut:
    """Return what validation sees of a picture."""
    size = asked.image_size or FILES_SIZE
    return Cut(size, asked.resize_size or size, None, asked.exif, asked.on_error == "skip")


def as_sample(pixels: Tensor, channels: int, height: int, width: int) -> Tensor:
    """Return a picture, uint8 of shape [3, any, any], as a sample of another shape: uint8 of [channels, height, width].

    One of another size is resized, whatever its aspect. The only channel is Pillow's grey (ITU-R 601-2).
    """
    if pixels.shape[1:] != (height, width):
        pixels = _resized(pixels, height, width)
    if channels == 3:
        return pixels
    red, green, blue = pixels.to(torch.int32)
    grey: Tensor = (red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16
    return grey.to(torch.uint8)[None]


@final
class PictureSplit:
    """Pictures as uint8 of shape [n, 3, size, size], and their classes."""

    in_memory: bool = False

    def __init__(self, source: Pictures, cut: Cut) -> None:
        self._source = source
        self._cut = cut

    def __len__(self) -> int:
        return len(self._source.targets)

    def fetch(self, indices: NDArray[np.int64], draw: int | None) -> tuple[Tensor, Tensor]:
        images = torch.empty(len(indices), 3, self._cut.size, self._cut.size, dtype=torch.uint8)
        targets = self._source.targets[torch.tensor(indices)]
        draws = self._draws(indices, draw)
        for place, index in enumerate(indices.tolist()):
            seen = self._seen(index, draws[place] if draws else None)
            if seen is None:
                targets[place] = SKIPPED
                images[place] = 0
            else:
                images[place] = seen
        return images, targets

    def _draws(self, indices: NDArray[np.int64], draw: int | None) -> list[list[float]] | None:
        if draw is None or self._cut.scale is None:
            return None
        drawn: list[list[float]] = random.uniform(random.key(random.AUGMENT, draw), indices, DRAWS).tolist()
        return drawn

    def _seen(self, index: int, draws: Sequence[float] | None) -> Tensor | None:
        """Return the part of a picture that the model sees; None for a corrupt one that is to be skipped."""
        try:
            pixels = decode(self._source.content(index), self._cut.exif)
        except UndecodableError as error:
            if self._cut.skips:
                return None
            raise TrainingError(
                f"{self._source.name(index)}: cannot be read as an image: {error}; remove it, or set "
                f"recipe.data.on_error=skip"
            ) from error
        return part(pixels, self._cut, draws)


def part(pixels: Tensor, cut: Cut, draws: Sequence[float] | None = None) -> Tensor:
    """Return what the model sees of a picture: uint8 of shape [3, size, size], by `draws` or else the centre."""
    _, height, width = pixels.shape
    if draws is None or cut.scale is None:
        high, wide = short_side(height, width, cut.resize)
        top, left, _, _ = centre(high, wide, cut.size)
        return _resized(pixels, high, wide)[:, top : top + cut.size, left : left + cut.size]
    top, left, high, wide = random_crop(height, width, cut.scale, draws)
    return _resized(pixels[:, top : top + high, left : left + wide], cut.size, cut.size)


def _resized(pixels: Tensor, height: int, width: int) -> Tensor:
    # On bytes with interleaved channels, as here, torch counts in whole numbers: in half Pillow's time, off
    # by at most one from it, with the same bits for AVX2, AVX-512 and any number of threads (not without AVX2).
    resized = F.interpolate(pixels[None], (height, width), mode="bilinear", antialias=True)
    return resized[0]
