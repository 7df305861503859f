"""The words of a recipe that only images know, and which data sets have a use for each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from lockstep.data.asked import Asked, ImageWords

FILES_SIZE: Final = 224  # of images that come as files, where a recipe gives none
SYNTHETIC_SIZE: Final = 32
SYNTHETIC: Final[Mapping[str, int]] = {  # the options of `synthetic`, with their defaults
    "samples": 4096,
    "validation_samples": 1024,
    "classes": 10,
    "channels": 3,
}
_NATIVE_SIZE: Final[Mapping[str, int]] = {"digits": 8, "cifar10": 32, "cifar100": 32, "mnist": 28, "fashion_mnist": 28}
_OF_FILES: Final = ("folder", "webdataset")


def misfits(asked: Asked) -> Iterator[str]:
    """Yield what this data set could only ignore, and what cannot be true together."""
    if asked.name in _OF_FILES:
        yield from _contradictions(asked.images)
    else:
        yield from _misplaced(asked)


def _misplaced(asked: Asked) -> Iterator[str]:
    name, words, only = asked.name, asked.images, " and ".join(_OF_FILES)
    native = _NATIVE_SIZE.get(name)
    if words.image_size not in (None, native) and name != "synthetic":
        yield f"image_size: {words.image_size} cannot be had, {_size(name)}; remove it"
    if words.resize_size is not None:
        yield f"resize_size: {words.resize_size} is only for data sets {only}; remove it"
    if words.resized_crop:
        yield f"augment.resized_crop: true is only for data sets {only}; remove it"
    if not words.exif:
        yield f"exif: false is only for data sets {only}; remove it"
    if asked.on_error == "skip" and ":" in name:
        yield f"on_error: skip is only for data sets {only}; catch the error in your own data set"


def _size(name: str) -> str:
    if ":" in name:
        return "its function decides the size"
    native = _NATIVE_SIZE.get(name)
    return f"its images are {native}x{native}" if native else "it has no images"


def _contradictions(words: ImageWords) -> Iterator[str]:
    size, scale = words.image_size or FILES_SIZE, words.resized_crop_scale
    if words.resize_size is not None and words.resize_size < size:
        yield f"resize_size: {words.resize_size} is less than the image_size {size} to be cut; use at least {size}"
    if not 0 < scale[0] <= scale[1] <= 1:
        yield (
            f"augment.resized_crop_scale: {list(scale)} is no range of shares of the area; "
            f"use 0 < smallest <= largest <= 1, such as [0.08, 1.0]"
        )
