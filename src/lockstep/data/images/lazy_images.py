"""Image datasets that decode, crop and resize images lazily."""

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
from lockstep.data.images.crops import (
    NUM_DRAWS,
    compute_center_crop_box,
    compute_random_crop_box,
    compute_resized_shape,
)
from lockstep.data.images.decoding import UndecodableError, decode
from lockstep.data.request import FILES_SIZE, DataRequest
from lockstep.errors import DataError
from lockstep.tasks.classification import SKIPPED, compute_skip_mask
from lockstep.tasks.dataset_properties import make_dataset_info

_MEAN: Final = (0.485, 0.456, 0.406)  # ImageNet mean of each channel
_STD: Final = (0.229, 0.224, 0.225)  # ImageNet standard deviation of each channel


class ImageSource(Protocol):
    """The interface of a source of encoded images, such as a folder or an archive."""

    targets: Tensor  # class indices, int64 of shape [n]

    def get_name(self, index: int) -> str:
        """Return the name of an image for error messages, such as its path."""

    def read_bytes(self, index: int) -> bytearray:
        """Return the encoded image. Raises TrainingError if it can't be read."""


@dataclass(frozen=True)
class CropSettings:
    """The settings for cropping images.

    If `scale` is None, images are center-cropped. Otherwise, they are cropped at random, and `scale` is the range of
    the crop area as a fraction of the image.
    """

    size: int  # side length of the crop in pixels
    resize: int  # length of the short side in pixels before a center crop
    scale: tuple[float, float] | None
    exif: bool = True  # whether to apply the EXIF orientation
    skip_damaged: bool = False  # whether to return zeros with the target SKIPPED for images that can't be decoded


def make_image_dataset(
    train: ImageSource, validation: ImageSource | None, classes: Sequence[str], request: DataRequest
) -> DataSet:
    """Return a dataset of images with the requested crops. Validation always uses center crops."""
    settings = get_crop_settings(request)
    scale = request.resized_crop_scale if request.resized_crop else None
    return DataSet(
        train=ImageSplit(train, replace(settings, scale=scale)),
        validation=None if validation is None else ImageSplit(validation, settings),
        files=(train.get_name, (validation or train).get_name),
        skipped=compute_skip_mask,
        facts=make_dataset_info(classes, (3, settings.size, settings.size), _MEAN, _STD),
    )


def get_crop_settings(request: DataRequest) -> CropSettings:
    """Return the crop settings for evaluations."""
    size = request.image_size or FILES_SIZE
    return CropSettings(size, request.resize_size or size, None, request.exif, request.on_error == "skip")


def to_sample(pixels: Tensor, channels: int, height: int, width: int) -> Tensor:
    """Resize and convert an image, uint8 of shape [3, h, w], to a sample, uint8 of shape [channels, height, width].

    The aspect ratio isn't kept. If `channels` is 1, the image is converted to grayscale as in Pillow (ITU-R 601-2).
    """
    if pixels.shape[1:] != (height, width):
        pixels = resize_image(pixels, height, width)
    if channels == 3:
        return pixels
    red, green, blue = pixels.to(torch.int32)
    gray: Tensor = (red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16
    return gray.to(torch.uint8)[None]


@final
class ImageSplit:
    """A split of cropped images, uint8 of shape [n, 3, size, size], and their classes, int64 of shape [n]."""

    in_memory: bool = False

    def __init__(self, source: ImageSource, settings: CropSettings) -> None:
        self._source = source
        self._settings = settings

    def __len__(self) -> int:
        return len(self._source.targets)

    def get_name(self, index: int) -> str:
        """Return the name of an image for error messages, such as its path."""
        return self._source.get_name(index)

    def get_target(self, index: int) -> int:
        """Return the class of an image."""
        return int(self._source.targets[index])

    def load_image(self, index: int) -> Tensor | None:
        """Return the full image, uint8 of shape [3, height, width].

        For a damaged image, returns None if the recipe skips damaged images, and raises DataError otherwise.
        """
        try:
            return decode(self._source.read_bytes(index), self._settings.exif)
        except UndecodableError as error:
            if self._settings.skip_damaged:
                return None
            raise DataError(
                f"{self._source.get_name(index)}: cannot be read as an image: {error}; convert or remove it, or set "
                f"recipe.data.on_error=skip"
            ) from error

    def fetch(self, indices: NDArray[np.int64], random_key: int | None) -> tuple[Tensor, Tensor]:
        images = torch.empty(len(indices), 3, self._settings.size, self._settings.size, dtype=torch.uint8)
        targets = self._source.targets[torch.tensor(indices)]
        rows = images.numpy()
        draws = self._draw_crop_numbers(indices, random_key)
        for row, index in enumerate(indices.tolist()):
            pixels = self.load_image(index)
            if pixels is None:
                targets[row] = SKIPPED
                rows[row] = 0
            else:
                # NumPy copies channels-last pixels in half the time of torch.
                rows[row] = crop_image(pixels, self._settings, draws[row] if draws else None).numpy()
        return images, targets

    def _draw_crop_numbers(self, indices: NDArray[np.int64], random_key: int | None) -> list[list[float]] | None:
        if random_key is None or self._settings.scale is None:
            return None
        values: list[list[float]] = random.draw_uniform(
            random.make_key(random.AUGMENT, random_key), indices, NUM_DRAWS
        ).tolist()
        return values


def crop_image(pixels: Tensor, settings: CropSettings, draws: Sequence[float] | None = None) -> Tensor:
    """Crop an image. Return the crop, uint8 of shape [3, size, size].

    `draws` contains the random numbers for a random crop. If it is None, returns the center crop.
    """
    _, height, width = pixels.shape
    if draws is None or settings.scale is None:
        rows, columns = compute_resized_shape(height, width, settings.resize)
        top, left, _, _ = compute_center_crop_box(rows, columns, settings.size)
        return resize_image(pixels, rows, columns)[:, top : top + settings.size, left : left + settings.size]
    top, left, rows, columns = compute_random_crop_box(height, width, settings.scale, draws)
    # Copy the box, because torch resizes a view more slowly if there are gaps between its rows.
    box = pixels.permute(1, 2, 0)[top : top + rows, left : left + columns].contiguous()
    return resize_image(box.permute(2, 0, 1), settings.size, settings.size)


def resize_image(pixels: Tensor, height: int, width: int) -> Tensor:
    """Resize an image, uint8 of shape [3, h, w], with bilinear interpolation and antialiasing."""
    # For uint8 tensors in channels-last format, torch uses integer arithmetic. This takes half the time of Pillow, and
    # pixel values differ from Pillow by at most 1. The result doesn't depend on the number of threads. CPUs with AVX2
    # and AVX-512 return the same bits, but CPUs without AVX2 don't.
    return F.interpolate(pixels[None], (height, width), mode="bilinear", antialias=True)[0]
