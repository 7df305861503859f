"""What the same bits cost: a whole step of data parallelism with the canonical sum against torch's own all-reduce.

Both train torchvision's ResNet-18 on 32x32 images with the same micro-batches on the same ranks, one thread each:
forward, backward, sum of the gradients, SGD with momentum in its multi-tensor form. Torch's DistributedDataParallel
accumulates under no_sync when a rank has more than one micro-batch. Both keep freed memory, so that what differs is the
sum and what belongs to it: losses and BatchNorm statistics over all micro-batches (torch sends those of rank 0).
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from functools import partial

import torch
import torchvision
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from benchmarks.processes import Contestant, Turn, take_turns, timed
from benchmarks.report import Result, Target, compare
from lockstep.comm.world import World
from lockstep.core.engine_recipe import PlainRecipe
from lockstep.core.order import Step, split_range
from lockstep.device.memory import keep_freed_memory
from lockstep.device.precision import select_deterministic_kernels
from lockstep.parallel.numerics import Numerics
from lockstep.parallel.optimize import make_optimizer
from lockstep.strategies.ddp import Strategy
from lockstep.tasks.base import MicroBatch, Problem
from lockstep.tasks.classification import Classification

SAMPLES = 64  # of a micro-batch, as in the recipe cifar10-resnet18
LR, MOMENTUM = 0.01, 0.9
TORCH, OURS = "torch DDP", "lockstep ddp"


def results(quick: bool) -> list[Result]:
    """Measure 2 and 4 processes, with one micro-batch for each and with two."""
    cases = [(2, 2)] if quick else [(2, 2), (2, 4), (4, 4), (4, 8)]
    return [_compared(size, microbatches, turns=2 if quick else 15) for size, microbatches in cases]


def _compared(size: int, microbatches: int, turns: int) -> Result:
    contestants = {
        TORCH: Contestant(partial(_torch, microbatches), size),
        OURS: Contestant(partial(_lockstep, microbatches), size),
    }
    return compare(
        f"exactness-{size}-processes-{microbatches}-microbatches",
        f"exactness: ResNet-18 at 32x32, {size} processes, {microbatches} micro-batches of {SAMPLES}, 1 thread each",
        "s a step",
        take_turns(contestants, turns),
        TORCH,
        [Target(OURS, TORCH, "at most", 1.10)],
    )


def _lockstep(microbatches: int, world: World) -> Turn:
    select_deterministic_kernels(num_threads=1)
    keep_freed_memory()
    engine = Strategy().start(
        Problem(Classification(), _model),
        lambda trained, _: _optimizer(trained),
        world,
        Numerics(PlainRecipe(microbatches=microbatches)),
    )
    own = [_microbatch(index) for index in split_range(microbatches, world.size)[world.rank]]
    step = Step(0, 0, 0, microbatches * SAMPLES, 0, False)

    def do() -> None:
        engine.forward_backward(own, step)
        engine.update(LR, None)

    return timed(do, world)


def _torch(microbatches: int, world: World) -> Turn:
    keep_freed_memory()
    model = DistributedDataParallel(_model())
    optimizer = _optimizer(model.named_parameters())
    own = [_microbatch(index) for index in split_range(microbatches, world.size)[world.rank]]

    def do() -> None:
        for microbatch in own:
            with model.no_sync() if microbatch is not own[-1] else nullcontext():
                (F.cross_entropy(model(microbatch.batch[0]), microbatch.batch[1]) / len(own)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return timed(do, world)


def _model() -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = torchvision.models.resnet18(num_classes=10)
    return model


def _optimizer(trained: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return make_optimizer(trained, name="sgd", lr=LR, momentum=MOMENTUM)


def _microbatch(index: int) -> MicroBatch:
    generator = torch.Generator().manual_seed(index)
    inputs = torch.randn(SAMPLES, 3, 32, 32, generator=generator)
    targets = torch.randint(10, (SAMPLES,), generator=generator)
    return MicroBatch(index, (inputs, targets), SAMPLES, SAMPLES)
