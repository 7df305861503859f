"""What whole tensors cost an optimizer that needs them: steps by timm's Muon, whose update is most of the time.

All train the same MLP of wide layers on tiny micro-batches. On two processes, each owner orthogonalizes about half of
the matrices, and the processes send each other the rows of the gradients and the weights (parallel/layouts/owned.py).
Under `ddp`, each process orthogonalizes all matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

import torch
from torch import nn
from torch.optim import Optimizer

from benchmarks.processes import Contestant, Turn, take_turns, timed
from benchmarks.report import Result, Target, compare
from lockstep.comm.world import World
from lockstep.core.engine_recipe import PlainRecipe
from lockstep.core.order import Step
from lockstep.parallel.layerwise import ComputeNorms
from lockstep.parallel.numerics import Numerics
from lockstep.parallel.optimize import make_optimizer
from lockstep.parallel.optimizer_state import NamedParameter
from lockstep.strategies import ddp, single, zero1, zero3
from lockstep.strategies.base import Strategy
from lockstep.tasks.base import MicroBatch, Problem
from lockstep.tasks.classification import Classification

WIDTH, DEPTH, SAMPLES, STEPS = 512, 8, 4, 2
ALONE: Final = "single, 1 process"
_PLACES: Final[dict[str, tuple[Strategy, int]]] = {
    ALONE: (single.Strategy(), 1),
    "ddp, 2 processes": (ddp.Strategy(), 2),
    "zero1, 2 processes": (zero1.Strategy(), 2),
    "zero3, 2 processes": (zero3.Strategy(), 2),
}


def results(quick: bool) -> list[Result]:
    """Measure all placements."""
    return [measure(turns=2 if quick else 10)]


def measure(turns: int) -> Result:
    """Measure the time of a step. The target is half of one process, and a tenth of that for the communication."""
    contestants = {name: Contestant(partial(_start, *place), place[1]) for name, place in _PLACES.items()}
    seconds = take_turns(contestants, turns)
    return compare(
        "whole_updates",
        f"Muon under strategies that shard rows: {DEPTH} matrices of {WIDTH} x {WIDTH}, 2 micro-batches of {SAMPLES}",
        "s a step",
        {name: [each / STEPS for each in own] for name, own in seconds.items()},
        ALONE,
        [Target(name, ALONE, "at most", 0.55) for name in ("zero1, 2 processes", "zero3, 2 processes")],
    )


def _start(strategy: Strategy, size: int, world: World) -> Turn:
    engine = strategy.start(
        Problem(Classification(), _model),
        _optimizer,
        world,
        Numerics(PlainRecipe(microbatches=2), needs_full_tensors=strategy.traits.cuts_rows),
    )
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(2, SAMPLES, WIDTH, generator=generator)
    targets = torch.randint(WIDTH, (2, SAMPLES), generator=generator)
    own = range(2) if size == 1 else [world.rank]
    microbatches = [MicroBatch(index, (inputs[index], targets[index]), SAMPLES, SAMPLES) for index in own]

    def train() -> None:
        for number in range(STEPS):
            step = Step(number, 0, 0, 2 * SAMPLES, number * 2 * SAMPLES, False)
            engine.forward_backward(microbatches, step)
            engine.update(0.01, None)

    return timed(train, world)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))


def _optimizer(trained: Sequence[NamedParameter], norms: ComputeNorms) -> Optimizer:
    return make_optimizer(trained, name="nmuon", lr=0.01, norms=norms)
