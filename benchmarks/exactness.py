"""What the same bits cost: a whole step of data parallelism with the canonical sum against torch's own all-reduce.

Both train torchvision's ResNet-18 on 32x32 images with the same micro-batches on the same ranks, one thread each:
forward, backward, sum of the gradients, SGD with momentum. Torch's DistributedDataParallel accumulates under no_sync
when a rank has more than one micro-batch. Both lie in the same processes and take turns step by step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from benchmarks import processes
from benchmarks.report import Result, compare
from lockstep.core.order import Step, cut
from lockstep.parallel.local import Numerics
from lockstep.parallel.optimize import make_optimizer
from lockstep.runtime.world import World
from lockstep.strategies.ddp import Strategy
from lockstep.tasks.base import MicroBatch
from lockstep.tasks.classification import Classification

SAMPLES = 16  # of a micro-batch
LR, MOMENTUM = 0.01, 0.9


def results(quick: bool) -> list[Result]:
    """Measure 2 and 4 processes, with one micro-batch for each and with two."""
    turns = 2 if quick else 15
    cases = [(2, 2)] if quick else [(2, 2), (2, 4), (4, 4), (4, 8)]
    return [_compared(size, microbatches, turns) for size, microbatches in cases]


def _compared(size: int, microbatches: int, turns: int) -> Result:
    figures = processes.run(size, _measure, microbatches, turns)
    ours, torchs = figures[::2], figures[1::2]
    return compare(
        f"exactness: ResNet-18 at 32x32, {size} processes, {microbatches} micro-batches of {SAMPLES}, 1 thread each",
        "s a step",
        {"torch DDP": torchs, "lockstep ddp": ours},
        "torch DDP",
        "lockstep at most 1.10 x torch DDP",
        lambda ratios: ratios["lockstep ddp"] <= 1.10,
    )


def _measure(world: World, microbatches: int, turns: int) -> list[float]:
    """Return seconds of ours, torch's, ours, torch's, ...: each the slowest rank's."""
    own = [_microbatch(index) for index in cut(microbatches, world.size)[world.rank]]
    steps = _ours(world, own, microbatches), _torchs(own)
    for step in steps * 2:
        step()
    figures = []
    for _ in range(turns):
        for step in steps:
            world.barrier()
            began = time.perf_counter()
            step()
            figures.append(processes.slowest(time.perf_counter() - began))
    return figures


def _model() -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = torchvision.models.resnet18(num_classes=10)
    return model


def _microbatch(index: int) -> MicroBatch:
    generator = torch.Generator().manual_seed(index)
    inputs = torch.randn(SAMPLES, 3, 32, 32, generator=generator)
    return MicroBatch(index, inputs, torch.randint(10, (SAMPLES,), generator=generator))


def _ours(world: World, own: list[MicroBatch], microbatches: int) -> Callable[[], None]:
    task = Classification(_model)
    engine = Strategy().start(task, _optimizer, world, Numerics(microbatches=microbatches))
    step = Step(0, 0, 0, microbatches * SAMPLES, 0, False)

    def run() -> None:
        engine.forward_backward(own, step)
        engine.update(LR, None)

    return run


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return make_optimizer(model.named_parameters(), name="sgd", lr=LR, momentum=MOMENTUM)


def _torchs(own: list[MicroBatch]) -> Callable[[], None]:
    model = DistributedDataParallel(_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, foreach=True)
    model.train()

    def run() -> None:
        for microbatch in own:
            with model.no_sync() if microbatch is not own[-1] else nullcontext():
                (_loss(model(microbatch.inputs), microbatch.targets) / len(own)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def _loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets)
