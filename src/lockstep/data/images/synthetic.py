"""A synthetic image dataset that is generated in memory. Each image is the random template of its class plus noise."""

from dataclasses import asdict, dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from lockstep.core import random
from lockstep.data.base import DataSet
from lockstep.data.images.tensors import TensorSplit
from lockstep.data.options import Count
from lockstep.data.request import SYNTHETIC, DataRequest
from lockstep.tasks.dataset_properties import make_dataset_info

_TEMPLATE_KEY: Final = random.make_key(random.SYNTHETIC, 0)
_TRAIN_KEY: Final = random.make_key(random.SYNTHETIC, 1)
_VALIDATION_KEY: Final = random.make_key(random.SYNTHETIC, 2)
_SIZE: Final = 32  # default side length of images in pixels
_GRID: Final = 4  # side length of the random grid from which a template is upsampled
_BLOCK_BYTES: Final = 1 << 23  # bytes of noise that are generated at a time, to limit the memory for the counters

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Options:
    """The numbers of training samples, validation samples, classes and channels."""

    samples: Count = SYNTHETIC["samples"]
    validation_samples: Count = SYNTHETIC["validation_samples"]
    classes: Count = SYNTHETIC["classes"]
    channels: Count = SYNTHETIC["channels"]


def open_data(request: DataRequest, options: Options) -> DataSet:
    """See Source."""
    return make_synthetic_dataset(image_size=request.image_size or _SIZE, **asdict(options))


def make_synthetic_dataset(
    *, image_size: int, samples: int, validation_samples: int, classes: int, channels: int
) -> DataSet:
    """Return a dataset of images with shape [channels, image_size, image_size], bit-identical on every machine.

    The class of sample i is i mod `classes`. Each pixel is 1/4 of the class template plus 3/4 of noise.
    """
    templates = _make_templates(classes, channels, image_size)
    # The standard deviation of x / 4 + 3 * y / 4, where x and y are independent and uniform in [0, 1].
    deviation = float(np.sqrt((1 / 4) ** 2 / 12 + (3 / 4) ** 2 / 12))
    names = [f"class {number}" for number in range(classes)]
    return DataSet(
        train=_make_split(_TRAIN_KEY, templates, samples),
        validation=_make_split(_VALIDATION_KEY, templates, validation_samples),
        facts=make_dataset_info(names, (channels, image_size, image_size), (0.5,) * channels, (deviation,) * channels),
    )


def _make_templates(num_classes: int, num_channels: int, image_size: int) -> Bytes:
    grids = _generate_bytes(_TEMPLATE_KEY, range(num_classes * num_channels), _GRID * _GRID).reshape(-1, _GRID, _GRID)
    # Pillow resizes uint8 images with integer arithmetic, so the result is bit-identical on every CPU.
    enlarged = [Image.fromarray(grid).resize((image_size, image_size), Image.Resampling.BICUBIC) for grid in grids]
    return np.stack([np.asarray(image) for image in enlarged]).reshape(
        num_classes, num_channels, image_size, image_size
    )


def _make_split(rng_key: int, templates: Bytes, num_samples: int) -> TensorSplit:
    targets = np.arange(num_samples) % len(templates)
    images = np.empty((num_samples, *templates.shape[1:]), np.uint8)
    pixels = templates[0].size
    count = max(1, _BLOCK_BYTES // pixels)
    for start in range(0, num_samples, count):
        numbers = range(start, min(start + count, num_samples))
        noise = _generate_bytes(rng_key, numbers, pixels).reshape(-1, *templates.shape[1:])
        images[start : numbers.stop] = templates[targets[start : numbers.stop]] // 4 + noise // 4 * 3
    return TensorSplit(torch.from_numpy(images), torch.from_numpy(targets))


def _generate_bytes(key: int, numbers: range, count: int) -> Bytes:
    """Return `count` random bytes for each of `numbers`. Each 64-bit hash provides eight bytes, little-endian."""
    words = -(-count // 8)
    counters = np.arange(numbers.start * words, numbers.stop * words, dtype=np.uint64)
    values = random.bits(key, counters).astype("<u8").view(np.uint8)
    return values.reshape(len(numbers), 8 * words)[:, :count]
