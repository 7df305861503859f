"""Input pipelines on one core: images per CPU second of the usual ones and of ours.

Every contestant ends with the same thing, a normalized float32 batch [n, 3, height, width] of shuffled, cropped and
flipped images; none has loader processes. All are held to the same core, on which they take turns. DALI and FFCV are
among them where they are installed: pip install nvidia-dali-cuda120 'numpy<2' ffcv, the latter with OpenCV's headers.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from itertools import chain, repeat
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision import datasets, transforms
from torchvision.io import decode_image
from torchvision.transforms import v2

from benchmarks.processes import Contestant, Turn, take_turns
from benchmarks.report import Result, Target, compare
from lockstep.comm.world import World
from lockstep.core.order import Steps
from lockstep.data.base import DataSet
from lockstep.data.images.device_transforms import ImageTransforms
from lockstep.data.images.lazy_images import ImageSplit
from lockstep.data.images.prepare import write_archives
from lockstep.data.images.tensors import TensorSplit
from lockstep.data.loader import Loader
from lockstep.data.request import DataRequest
from lockstep.data.sources import open_data
from lockstep.device.memory import keep_freed_memory
from lockstep.device.precision import select_deterministic_kernels

CIFAR: Final = {"mean": (0.4914, 0.4822, 0.4465), "std": (0.2023, 0.1994, 0.2010)}
IMAGENET: Final = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
SMALL_BATCH, LARGE_BATCH = 256, 32
PIL, NEWER, OURS, PREPARED = "PIL", "torchvision.io + v2", "lockstep", "lockstep, prepared"
DALI, FFCV = "DALI", "FFCV, raw"


def results(quick: bool) -> list[Result]:
    """Measure small images in memory and JPEGs in files."""
    with tempfile.TemporaryDirectory() as root:
        size = _write_jpegs(Path(root), 32 if quick else 256)
        return [_small(quick), _large(root, size, quick)]


def _small(quick: bool) -> Result:
    count = 2_000 if quick else 50_000
    return _compared(
        "input-small",
        "input: 32x32 uint8 images: pad 4, crop, flip, normalize",
        {PIL: partial(_small_pil, count), OURS: partial(_small_ours, count)},
        quick=quick,
        targets=[Target(OURS, PIL, "at least", 4.0)],
    )


def _large(root: str, bytes_each: int, quick: bool) -> Result:
    contestants = {PIL: _large_pil, NEWER: _large_newer, OURS: _large_ours, PREPARED: _large_prepared}
    targets = [Target(OURS, PIL, "at least", 1.5), Target(OURS, NEWER, "at least", 1.5)]
    if find_spec("nvidia.dali") is not None:
        contestants[DALI] = _large_dali
        targets.append(Target(OURS, DALI, "at least", 1.3))
    if find_spec("ffcv") is not None:
        _write_ffcv(root)  # here, because it starts processes, which a contestant may not
        contestants[FFCV] = _large_ffcv
        targets.append(Target(PREPARED, FFCV, "at least", 1.0))
    return _compared(
        "input-jpeg",
        f"input: 500x375 JPEGs of {bytes_each:,} bytes: random crop to 224, flip, normalize",
        {name: partial(build, root) for name, build in contestants.items()},
        quick=quick,
        targets=targets,
    )


def _compared(
    name: str,
    title: str,
    pipelines: dict[str, Callable[[], Callable[[], Iterator[Tensor]]]],
    quick: bool,
    targets: list[Target],
) -> Result:
    contestants = {each: Contestant(partial(_turn, build, 0.1 if quick else 1.0)) for each, build in pipelines.items()}
    seconds = take_turns(contestants, 2 if quick else 9)
    speeds = {each: [1 / turn for turn in own] for each, own in seconds.items()}
    return compare(name, f"{title}; one core", "images/CPU second", speeds, PIL, targets)


def _turn(build: Callable[[], Callable[[], Iterator[Tensor]]], least_s: float, _: World) -> Turn:
    """Take batches for `least_s` a turn, and give the CPU seconds of one image.

    `build` makes what gives one pass over the training images. DALI's threads load batches ahead while the others take
    their turns, so these CPU seconds count in its next turn.
    """
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    batches = chain.from_iterable(one_pass() for one_pass in repeat(build()))
    counted_s = time.process_time()

    def turn() -> float:
        nonlocal counted_s
        seen, began_s, began = 0, counted_s, time.perf_counter()
        while time.perf_counter() - began < least_s:
            batch = next(batches)
            assert batch.dtype == torch.float32
            seen += len(batch)
        counted_s = time.process_time()
        return (counted_s - began_s) / seen

    return turn


def _small_pil(count: int) -> Callable[[], Iterator[Tensor]]:
    pipeline = transforms.Compose(
        [
            transforms.RandomCrop(32, padding=4),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(**CIFAR),
        ]
    )
    loader = DataLoader(_Pictures(*_small_images(count), pipeline), batch_size=SMALL_BATCH, shuffle=True)
    return lambda: _inputs(loader)


def _small_ours(count: int) -> Callable[[], Iterator[Tensor]]:
    images, targets = _small_images(count)
    split = TensorSplit(torch.from_numpy(images).permute(0, 3, 1, 2).contiguous(), torch.from_numpy(targets))
    data = DataSet(split, split)
    transforms = ImageTransforms(10, crop_padding=4, flip=True, **CIFAR)
    return _ours(data, transforms, SMALL_BATCH)


class _Pictures(Dataset[Any]):
    """torchvision's CIFAR10 without its files: images are [n, 32, 32, 3], as it holds them."""

    def __init__(self, images: NDArray[np.uint8], targets: NDArray[np.int64], transform: Callable[..., Tensor]) -> None:
        self._images = images
        self._targets = targets.tolist()
        self._transform = transform

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._transform(Image.fromarray(self._images[index])), self._targets[index]


def _large_pil(root: str) -> Callable[[], Iterator[Tensor]]:
    pipeline = transforms.Compose(
        [
            transforms.RandomResizedCrop(224),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(**IMAGENET),
        ]
    )
    loader = DataLoader(datasets.ImageFolder(f"{root}/train", pipeline), batch_size=LARGE_BATCH, shuffle=True)
    return lambda: _inputs(loader)


def _large_newer(root: str) -> Callable[[], Iterator[Tensor]]:
    pipeline = v2.Compose(
        [
            v2.RandomResizedCrop(224, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(**IMAGENET),
        ]
    )
    dataset = datasets.ImageFolder(f"{root}/train", pipeline, loader=_decoded)
    loader = DataLoader(dataset, batch_size=LARGE_BATCH, shuffle=True)
    return lambda: _inputs(loader)


def _large_ours(root: str) -> Callable[[], Iterator[Tensor]]:
    data = open_data(DataRequest("folder", root, image_size=224, resize_size=256, resized_crop=True))
    return _ours(data, ImageTransforms(2, flip=True, **IMAGENET), LARGE_BATCH)


def _large_prepared(root: str) -> Callable[[], Iterator[Tensor]]:
    data = open_data(DataRequest("folder", root, image_size=224, resize_size=256, resized_crop=True))
    folder = Path(tempfile.mkdtemp(dir=root))
    for part, split in (("train", data.train), ("val", data.validation)):
        assert isinstance(split, ImageSplit)
        deque(write_archives(split, folder, part), maxlen=0)
    pixels = DataRequest("webdataset", str(folder), image_size=224, resize_size=256, resized_crop=True)
    return _ours(open_data(pixels), ImageTransforms(2, flip=True, **IMAGENET), LARGE_BATCH)


def _large_dali(root: str) -> Callable[[], Iterator[Tensor]]:
    from nvidia.dali import fn, pipeline_def, types
    from nvidia.dali.plugin.pytorch import DALIGenericIterator, LastBatchPolicy

    @pipeline_def(batch_size=LARGE_BATCH, num_threads=1, device_id=None, seed=0)
    def pipeline() -> Any:
        files, _ = fn.readers.file(file_root=f"{root}/train", random_shuffle=True, name="files")
        images = fn.decoders.image_random_crop(files, random_area=(0.08, 1.0), random_aspect_ratio=(3 / 4, 4 / 3))
        return fn.crop_mirror_normalize(
            fn.resize(images, size=(224, 224)),
            dtype=types.FLOAT,
            output_layout="CHW",
            mean=[255 * each for each in IMAGENET["mean"]],
            std=[255 * each for each in IMAGENET["std"]],
            mirror=fn.random.coin_flip(),
        )

    batches = DALIGenericIterator(
        pipeline(), ["inputs"], reader_name="files", last_batch_policy=LastBatchPolicy.PARTIAL, auto_reset=True
    )
    return lambda: (batch[0]["inputs"] for batch in batches)


def _write_ffcv(root: str) -> None:
    from ffcv.fields import IntField, RGBImageField
    from ffcv.writer import DatasetWriter

    fields = {"image": RGBImageField(write_mode="raw"), "label": IntField()}
    writer = DatasetWriter(f"{root}/train.beton", fields, num_workers=1)
    writer.from_indexed_dataset(datasets.ImageFolder(f"{root}/train"))


def _large_ffcv(root: str) -> Callable[[], Iterator[Tensor]]:
    from ffcv import transforms as steps
    from ffcv.fields.rgb_image import RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader as FfcvLoader
    from ffcv.loader import OrderOption

    mean, std = (255 * np.array(IMAGENET[each]) for each in ("mean", "std"))
    image = [
        RandomResizedCropRGBImageDecoder((224, 224)),
        steps.RandomHorizontalFlip(),
        steps.NormalizeImage(mean, std, np.float32),
        steps.ToTensor(),
        steps.ToTorchImage(convert_back_int16=False),
    ]
    loader = FfcvLoader(
        f"{root}/train.beton",
        batch_size=LARGE_BATCH,
        num_workers=1,
        order=OrderOption.RANDOM,
        pipelines={"image": image, "label": None},
        drop_last=False,
    )
    return lambda: (batch[0].contiguous() for batch in loader)


def _decoded(path: str) -> Tensor:
    image: Tensor = decode_image(path, mode="RGB")
    return image


def _inputs(loader: DataLoader[Any]) -> Iterator[Tensor]:
    return (inputs for inputs, _ in loader)


def _ours(data: DataSet, transforms: ImageTransforms, batch: int) -> Callable[[], Iterator[Tensor]]:
    select_deterministic_kernels(num_threads=1)
    keep_freed_memory()
    loader = Loader(data, Steps(len(data.train), batch, epochs=1), 1, transforms, torch.device("cpu"), 0)
    return lambda: (microbatches[0].batch[0] for _, microbatches in loader.iterate_steps(0))


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
