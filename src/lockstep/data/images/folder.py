"""Images in a folder for each class, as ImageNet lies on disks; read, cut and resized when they are asked for."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal, final

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from lockstep import plainfile
from lockstep.core import random
from lockstep.data.base import DataSet
from lockstep.data.images.crops import DRAWS, centre, random_crop, short_side
from lockstep.data.images.decoding import decode
from lockstep.data.images.facts import facts
from lockstep.data.images.scan import scan
from lockstep.errors import TrainingError
from lockstep.tasks.classification import SKIPPED, skipped_samples

_MEAN: Final = (0.485, 0.456, 0.406)  # of ImageNet
_STD: Final = (0.229, 0.224, 0.225)


def folder(
    root: str,
    *,
    image_size: int,
    resize_size: int,
    scale: tuple[float, float] | None,
    exif: bool,
    on_error: Literal["raise", "skip"],
) -> DataSet:
    """Return the images of `root/train/<class>/` and `root/val/<class>/`, image_size pixels high and wide.

    With `scale`, training sees a random crop of that range of the area. Validation, and training without it, see
    the centre after the short side is resized to `resize_size`. `exif` turns images upright as their metadata says.
    """
    found = scan(root)
    skips = on_error == "skip"
    train = FolderSplit(found.train, image_size, resize_size, scale, exif, skips)
    validation = FolderSplit(found.validation, image_size, resize_size, None, exif, skips)
    return DataSet(
        train=train,
        validation=validation,
        files=(train.file, validation.file),
        skipped=skipped_samples,
        facts=facts(found.classes, (3, image_size, image_size), _MEAN, _STD),
    )


@final
class FolderSplit:
    """Files and the class of each."""

    in_memory: bool = False

    def __init__(
        self,
        files: Sequence[tuple[str, int]],
        image_size: int,
        resize_size: int,
        scale: tuple[float, float] | None,
        exif: bool,
        skips: bool,
    ) -> None:
        # One array, not a list: counting references to a million names would copy them into each loader process.
        names = [os.fsencode(file) for file, _ in files]
        self._names = np.frombuffer(b"".join(names), np.uint8)
        self._ends = np.cumsum([len(name) for name in names])
        self._targets = torch.tensor([target for _, target in files])
        self._size = image_size
        self._resize = resize_size
        self._scale = scale
        self._exif = exif
        self._skips = skips

    def __len__(self) -> int:
        return len(self._targets)

    def fetch(self, indices: NDArray[np.int64], draw: int | None) -> tuple[Tensor, Tensor]:
        images = torch.empty(len(indices), 3, self._size, self._size, dtype=torch.uint8)
        targets = self._targets[torch.tensor(indices)]
        draws = self._draws(indices, draw)
        for place, index in enumerate(indices.tolist()):
            seen = self._seen(self.file(index), draws[place] if draws else None)
            if seen is None:
                targets[place] = SKIPPED
                images[place] = 0
            else:
                images[place] = seen
        return images, targets

    def _draws(self, indices: NDArray[np.int64], draw: int | None) -> list[list[float]] | None:
        if draw is None or self._scale is None:
            return None
        drawn: list[list[float]] = random.uniform(random.key(random.AUGMENT, draw), indices, DRAWS).tolist()
        return drawn

    def file(self, index: int) -> str:
        """Return the path of a sample's image."""
        start = self._ends[index - 1] if index else 0
        return os.fsdecode(self._names[start : self._ends[index]].tobytes())

    def _seen(self, file: str, draws: Sequence[float] | None) -> Tensor | None:
        """Return the part of an image that the model sees; None for a corrupt one that is to be skipped."""
        content = _read(file)
        try:
            pixels = decode(content, self._exif)
        except MemoryError:
            raise
        except Exception as error:  # decoders of strange bytes raise OSError, SyntaxError, struct.error, ...
            if self._skips:
                return None
            raise TrainingError(
                f"{file}: cannot be read as an image: {_said(error)}; remove it, or set recipe.data.on_error=skip"
            ) from error
        return self._cut(pixels, draws)

    def _cut(self, pixels: Tensor, draws: Sequence[float] | None) -> Tensor:
        _, height, width = pixels.shape
        if draws is None or self._scale is None:
            high, wide = short_side(height, width, self._resize)
            top, left, _, _ = centre(high, wide, self._size)
            return _resized(pixels, high, wide)[:, top : top + self._size, left : left + self._size]
        top, left, high, wide = random_crop(height, width, self._scale, draws)
        return _resized(pixels[:, top : top + high, left : left + wide], self._size, self._size)


def _read(file: str) -> bytearray:
    # Not skipped whatever the recipe says: a disk or a network that fails is no property of the data.
    try:
        with plainfile.reader(Path(file), links=True) as stream:
            return bytearray(stream.read())
    except OSError as error:
        advice = "remove it" if error.errno == errno.EINVAL else "check the disk it is on"
        raise TrainingError(f"{file}: cannot be read: {error.strerror}; {advice}") from error


def _resized(pixels: Tensor, height: int, width: int) -> Tensor:
    # On bytes whose channels lie together, as they do here, torch counts in whole numbers: in half Pillow's time, off
    # by at most one from it, with the same bits for AVX2, AVX-512 and any number of threads (not without AVX2).
    resized = F.interpolate(pixels[None], (height, width), mode="bilinear", antialias=True)
    return resized[0]


def _said(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
