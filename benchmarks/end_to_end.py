"""A whole training, input pipeline included: images/s of ResNet-18 at 32x32 on the CPU against the tutorial's scripts.

The tutorial's loop: PIL images, torchvision transforms, a DataLoader, cross entropy, SGD with momentum; on two
processes DistributedSampler and DistributedDataParallel. Ours: the loader, engine and loop that `lockstep train` runs,
with the same global batch, one micro-batch for each process (and the same work cut into 4 for comparison). One thread
each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
import torchvision
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchvision import transforms

from benchmarks import processes
from benchmarks.loop import no_evaluation, no_save
from benchmarks.report import Result, compare
from lockstep.core.order import Steps
from lockstep.core.rate import Rate
from lockstep.data.base import DataSet
from lockstep.data.loader import Finish, Loader
from lockstep.data.tensors import TensorSplit
from lockstep.parallel.local import Numerics
from lockstep.parallel.optimize import make_optimizer
from lockstep.runtime.signals import StopRequest
from lockstep.runtime.world import World
from lockstep.strategies.ddp import Strategy
from lockstep.tasks.classification import Classification
from lockstep.training.loop import Every, Plan, Progress, train

BATCH, SAMPLES, CLASSES = 64, 5120, 10
LR, MOMENTUM = 0.01, 0.9
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)

Batches = Callable[[], object]  # trains on one batch


def results(quick: bool) -> list[Result]:
    """Measure one and two processes."""
    turns, batches = (2, 2) if quick else (7, 10)
    found = []
    for size in (1, 2):
        figures = processes.run(size, _measure, turns, batches)
        tutorial, ours, cut = figures[::3], figures[1::3], figures[2::3]
        found.append(
            compare(
                f"end to end: ResNet-18 at 32x32, batch {BATCH}, {size} process(es), 1 thread each",
                "images/s",
                {"tutorial": tutorial, f"lockstep, {size} micro-batch(es)": ours, "lockstep, 4 micro-batches": cut},
                "tutorial",
                "lockstep, with one micro-batch for each process, at least the tutorial's",
                lambda ratios, size=size: ratios[f"lockstep, {size} micro-batch(es)"] >= 1.0,  # type: ignore[misc]
            )
        )
    return found


def _measure(world: World, turns: int, batches: int) -> list[float]:
    """Return images/s of the tutorial, of ours and of ours with 4 micro-batches, and again, over all ranks."""
    contestants = _tutorial(world), _ours(world, world.size), _ours(world, 4)
    for step in contestants:
        next(step)
    figures = []
    for _ in range(turns):
        for step in contestants:
            world.barrier()
            began = time.perf_counter()
            for _ in range(batches):
                next(step)
            figures.append(batches * BATCH / processes.slowest(time.perf_counter() - began))
    return figures


def _images() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    return generator.integers(0, 256, (SAMPLES, 32, 32, 3), np.uint8), generator.integers(0, CLASSES, SAMPLES)


def _model() -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = torchvision.models.resnet18(num_classes=CLASSES)
    return model


class _Tutorial(Dataset[tuple[Tensor, int]]):
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


def _tutorial(world: World) -> Iterator[None]:
    """Train as the tutorials do; each `next` is one step."""
    dataset = _Tutorial()
    alone = world.size == 1
    sampler: DistributedSampler[Dataset[tuple[Tensor, int]]] | None = None if alone else DistributedSampler(dataset)
    loader = DataLoader(dataset, BATCH // world.size, shuffle=sampler is None, sampler=sampler)
    model = _model() if alone else DistributedDataParallel(_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    model.train()
    while True:
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            yield


def _ours(world: World, microbatches: int) -> Iterator[object]:
    """Train as `lockstep train` does; each `next` is one step and its event."""
    images, targets = _images()
    split = TensorSplit(torch.from_numpy(images).permute(0, 3, 1, 2).contiguous(), torch.from_numpy(targets))
    data = DataSet(split, split, [str(each) for each in range(CLASSES)], (3, 32, 32), MEAN, STD)
    steps = Steps(SAMPLES, BATCH, steps=10**6)
    finish = Finish(world.device, CLASSES, mean=MEAN, std=STD, crop_padding=4, flip=True)
    loader = Loader(data, steps, microbatches, finish, world.rank, world.size)
    engine = Strategy().start(
        Classification(_model),
        lambda model: make_optimizer(model.named_parameters(), name="sgd", lr=LR, momentum=MOMENTUM),
        world,
        Numerics(microbatches=microbatches),
    )
    never = Every(steps=10**9)
    plan = Plan(steps, Rate(LR, SAMPLES, 1.0), log=Every(steps=1), evaluate=never, save=never)
    return train(engine, world, loader.training, plan, Progress(), no_evaluation, no_save, StopRequest())
