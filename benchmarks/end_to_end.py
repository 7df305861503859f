"""A whole training, input pipeline included: images/s of ResNet-18 at 32x32 on the CPU against the tutorial's scripts.

The tutorial's loop: PIL images, torchvision transforms, a DataLoader, cross entropy, SGD with momentum; on two
processes DistributedSampler and DistributedDataParallel. Ours: what `lockstep train` runs, its loader, engine and loop,
with the same global batch. One micro-batch for each process is the tutorial's work; smaller ones, which let more
processes share a step later, cost what smaller batches cost. One thread each, no loader processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
import torchvision
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchvision import transforms

from benchmarks.loop import train_only
from benchmarks.processes import Contestant, Turn, take_turns, timed
from benchmarks.report import Result, Target, compare
from lockstep.comm.world import World
from lockstep.core.engine_recipe import PlainRecipe
from lockstep.core.mesh import DataRank
from lockstep.core.order import Steps
from lockstep.core.rate import RateSchedule
from lockstep.data.base import DataSet
from lockstep.data.images.device_transforms import ImageTransforms
from lockstep.data.images.tensors import TensorSplit
from lockstep.data.loader import Loader
from lockstep.device.memory import keep_freed_memory
from lockstep.device.precision import select_deterministic_kernels
from lockstep.parallel.numerics import Numerics
from lockstep.parallel.optimize import make_optimizer
from lockstep.strategies.ddp import Strategy
from lockstep.tasks.base import Problem
from lockstep.tasks.classification import Classification

BATCH, SAMPLES, CLASSES = 256, 5120, 10  # the global batch of the tutorial and of the recipe cifar10-resnet18
LR, MOMENTUM = 0.01, 0.9
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
TUTORIAL = "tutorial"


def results(quick: bool) -> list[Result]:
    """Measure one and two processes."""
    return [_compared(size, steps=1 if quick else 3, turns=2 if quick else 9) for size in (1, 2)]


def _compared(size: int, steps: int, turns: int) -> Result:
    contestants = {TUTORIAL: Contestant(partial(_tutorial, steps), size)}
    for microbatches in (size, 4):
        contestants[_ours(microbatches)] = Contestant(partial(_lockstep, steps, microbatches), size)
    seconds = take_turns(contestants, turns)
    return compare(
        f"end-to-end-{size}",
        f"end to end: ResNet-18 at 32x32, global batch {BATCH}, {size} process{'es' * (size > 1)}, 1 thread each",
        "images/s",
        {name: [steps * BATCH / each for each in own] for name, own in seconds.items()},
        TUTORIAL,
        [Target(_ours(size), TUTORIAL, "at least", 1.0)],
    )


def _ours(microbatches: int) -> str:
    return f"lockstep, {microbatches} micro-batch{'es' * (microbatches > 1)}"


def _tutorial(steps: int, world: World) -> Turn:
    dataset = _Pictures()
    alone = world.size == 1
    sampler = None if alone else DistributedSampler(dataset)
    loader: DataLoader[Any] = DataLoader(dataset, BATCH // world.size, shuffle=alone, sampler=sampler)
    model = _model() if alone else DistributedDataParallel(_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    return _turn(steps, world, _tutorial_steps(loader, sampler, model, optimizer))


def _tutorial_steps(
    loader: DataLoader[Any], sampler: DistributedSampler[Any] | None, model: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[None]:
    epoch = 0
    while True:
        if sampler is not None:
            sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            yield
        epoch += 1


def _lockstep(steps: int, microbatches: int, world: World) -> Turn:
    select_deterministic_kernels(num_threads=1)
    keep_freed_memory()
    images, targets = _images()
    split = TensorSplit(torch.from_numpy(images).permute(0, 3, 1, 2).contiguous(), torch.from_numpy(targets))
    data = DataSet(split, split)
    endless = Steps(SAMPLES, BATCH, steps=10**6)
    transforms = ImageTransforms(CLASSES, mean=MEAN, std=STD, crop_padding=4, flip=True)
    loader = Loader(data, endless, microbatches, transforms, world.device, 0, DataRank(world.rank, world.size))
    engine = Strategy().start(
        Problem(Classification(), _model),
        lambda trained, _: make_optimizer(trained, name="sgd", lr=LR, momentum=MOMENTUM),
        world,
        Numerics(PlainRecipe(microbatches=microbatches)),
    )
    rate = RateSchedule(LR, SAMPLES, 1.0)
    return _turn(steps, world, train_only(engine, loader, world, rate, log_every=1))


def _turn(steps: int, world: World, training: Iterator[object]) -> Turn:
    """Return a turn of `steps` steps: `training` does one for each `next`."""

    def do() -> None:
        for _ in range(steps):
            next(training)

    return timed(do, world)


class _Pictures(Dataset[tuple[Tensor, int]]):
    """What torchvision's CIFAR10 does: a PIL image through transforms."""

    def __init__(self) -> None:
        self._images, self._targets = _images()
        self._transform = transforms.Compose(
            [
                transforms.RandomCrop(32, padding=4),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize(MEAN, STD),
            ]
        )

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._transform(Image.fromarray(self._images[index])), int(self._targets[index])


def _images() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    generator = np.random.default_rng(0)
    return generator.integers(0, 256, (SAMPLES, 32, 32, 3), np.uint8), generator.integers(0, CLASSES, SAMPLES)


def _model() -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = torchvision.models.resnet18(num_classes=CLASSES)
    return model
