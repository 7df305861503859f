"""Input pipelines on one core: images a second of the usual ones and of ours, side by side in one run.

Every contestant ends with the same thing, a normalised float32 batch [n, 3, height, width] of shuffled, cropped and
flipped images; none has loader processes. The contestants take turns in each repeat, and a ratio is the median
over the repeats, so that a slower minute of the machine falls on all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision import datasets, transforms
from torchvision.io import decode_image
from torchvision.transforms import v2

from lockstep.core.order import Steps
from lockstep.data.base import DataSet
from lockstep.data.folder import folder
from lockstep.data.loader import Finish, Loader
from lockstep.data.tensors import TensorSplit

CIFAR = {"mean": (0.4914, 0.4822, 0.4465), "std": (0.2023, 0.1994, 0.2010)}
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
OURS = "lockstep"

Batches = Callable[[], Iterator[Tensor]]  # one pass over shuffled training images


def main(quick: bool = False) -> dict[str, Any]:
    """Measure both kinds of input, print a table for each, return the figures; `quick` only shows that it runs."""
    repeats = 2 if quick else 7
    with _one_core(), tempfile.TemporaryDirectory() as root:
        small = _small_images(2_000 if quick else 50_000)
        bytes_each = _write_jpegs(Path(root), 32 if quick else 256)
        results = {
            "small": _measure(_small_contestants(*small), images=512 if quick else 5_120, repeats=repeats),
            "jpeg": _measure(_jpeg_contestants(root), images=32 if quick else 256, repeats=repeats),
        }
    _print("32x32 uint8 images: pad 4, crop, flip, normalise", results["small"])
    _print(f"500x375 JPEGs of {bytes_each} bytes: random crop to 224, flip, normalise", results["jpeg"])
    return {"unit": "images/s on one core", "jpeg_bytes": bytes_each, "repeats": repeats, **results}


@contextmanager
def _one_core() -> Iterator[None]:
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    os.sched_setaffinity(0, {max(cores)})
    torch.set_num_threads(1)
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(threads)


def _measure(contestants: dict[str, Batches], images: int, repeats: int) -> dict[str, dict[str, float]]:
    speeds: dict[str, list[float]] = {name: [] for name in contestants}
    for batches in contestants.values():  # imports, memory and files are warm before the first repeat
        next(batches())
    for _ in range(repeats):
        for name, batches in contestants.items():
            speeds[name].append(_speed(batches, images))
    return {
        name: {
            "images_per_s": statistics.median(own),
            "slowest": min(own),
            "fastest": max(own),
            "ours_is_times": statistics.median(o / s for o, s in zip(speeds[OURS], own, strict=True)),
        }
        for name, own in speeds.items()
    }


def _speed(batches: Batches, images: int) -> float:
    seen = 0
    start = time.perf_counter()
    for batch in batches():
        assert batch.dtype == torch.float32
        seen += len(batch)
        if seen >= images:
            break
    return seen / (time.perf_counter() - start)


def _small_contestants(images: NDArray[np.uint8], targets: NDArray[np.int64]) -> dict[str, Batches]:
    """The CIFAR tutorial's pipeline, and ours. `images` is [n, 32, 32, 3], as torchvision's CIFAR10 holds them."""
    pipeline = transforms.Compose(
        [
            transforms.RandomCrop(32, padding=4),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(**CIFAR),
        ]
    )
    tutorial = DataLoader(_Pictures(images, targets, pipeline), batch_size=256, shuffle=True)
    split = TensorSplit(torch.from_numpy(images).permute(0, 3, 1, 2).contiguous(), torch.from_numpy(targets))
    data = DataSet(split, split, [str(number) for number in range(10)], (3, 32, 32))
    finish = Finish(torch.device("cpu"), 10, crop_padding=4, flip=True, **CIFAR)
    return {"PIL (tutorial)": lambda: _inputs(tutorial), OURS: lambda: _ours(data, finish, 256)}


class _Pictures(Dataset[Any]):
    """torchvision's CIFAR10 without its files."""

    def __init__(self, images: NDArray[np.uint8], targets: NDArray[np.int64], transform: Callable[..., Tensor]) -> None:
        self._images = images
        self._targets = targets.tolist()
        self._transform = transform

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._transform(Image.fromarray(self._images[index])), self._targets[index]


def _jpeg_contestants(root: str) -> dict[str, Batches]:
    pil = transforms.Compose(
        [
            transforms.RandomResizedCrop(224),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(**IMAGENET),
        ]
    )
    tensors = v2.Compose(
        [
            v2.RandomResizedCrop(224, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(**IMAGENET),
        ]
    )
    train = f"{root}/train"
    usual = DataLoader(datasets.ImageFolder(train, pil), batch_size=32, shuffle=True)
    newer = DataLoader(datasets.ImageFolder(train, tensors, loader=_decoded), batch_size=32, shuffle=True)
    data = folder(root, image_size=224, resize_size=256, scale=(0.08, 1.0), on_error="raise")
    finish = Finish(torch.device("cpu"), 2, flip=True, **IMAGENET)
    return {
        "PIL (torchvision)": lambda: _inputs(usual),
        "torchvision.io + v2": lambda: _inputs(newer),
        OURS: lambda: _ours(data, finish, 32),
    }


def _decoded(path: str) -> Tensor:
    image: Tensor = decode_image(path, mode="RGB")
    return image


def _inputs(loader: DataLoader[Any]) -> Iterator[Tensor]:
    return (inputs for inputs, _ in loader)


def _ours(data: DataSet, finish: Finish, batch: int) -> Iterator[Tensor]:
    loader = Loader(data, Steps(len(data.train), batch, epochs=1), 1, finish)
    return (microbatches[0].inputs for _, microbatches in loader.training(0))


def _small_images(count: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
    return images, generator.integers(0, 10, count)


def _write_jpegs(root: Path, count: int) -> int:
    """Write `count` JPEGs of quality 90 into a folder of two classes; return their mean size in bytes."""
    generator = np.random.default_rng(0)
    sizes = []
    for number in range(count):
        place = root / "train" / str(number % 2) / f"{number}.jpg"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(_smooth(generator)).save(place, quality=90)
        sizes.append(place.stat().st_size)
    for name in "01":
        (root / "val" / name).mkdir(parents=True)
        Image.fromarray(_smooth(generator)).save(root / "val" / name / "0.jpg", quality=90)
    return round(statistics.mean(sizes))


def _smooth(generator: np.random.Generator) -> NDArray[np.uint8]:
    """Add random fields of falling size and strength: what is in photographs, roughly as much at each scale."""
    total = np.zeros((375, 500, 3))
    for cells, strength in ((4, 90.0), (16, 45.0), (64, 22.0), (256, 11.0)):
        grid = generator.integers(0, 256, (cells * 3 // 4, cells, 3), dtype=np.uint8)
        enlarged = Image.fromarray(grid).resize((500, 375), Image.Resampling.BICUBIC)
        total += (np.asarray(enlarged, np.float64) / 127.5 - 1.0) * strength
    return (total + 128.0).clip(0, 255).astype(np.uint8)


def _print(title: str, results: dict[str, dict[str, float]]) -> None:
    print(f"\n{title}; images/s on one core")
    print(f"{'':24}{'median':>10}{'slowest':>10}{'fastest':>10}{'ours is':>10}")
    for name, figures in results.items():
        speeds = "".join(f"{figures[key]:>10,.0f}" for key in ("images_per_s", "slowest", "fastest"))
        print(f"{name:24}{speeds}{figures['ours_is_times']:>9.2f}x")


def _command_line() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="few images and repeats; the figures mean little")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    arguments = parser.parse_args()
    figures = main(arguments.quick)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    _command_line()
