"""What the checks of a custom loop cost on a model with many modules: CPU time of a step, with and without them.

Both train the same narrow MLP, whose modules and parameters are many and whose arithmetic is small, in this process.
Without the checks means `NoGuard`, with which `lockstep verify` is tested.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep
from benchmarks.loop import join_quietly
from benchmarks.processes import Contestant, Turn, take_measured_turns
from benchmarks.report import Result, Target, compare
from lockstep.comm.world import World

DEPTHS: Final = (50, 200)
WIDTH, BATCH, SAMPLES = 16, 64, 6400
GUARDED, UNGUARDED = "with checks", "without checks"
_TARGET: Final = Target(GUARDED, UNGUARDED, "at most", 1.02)


def results(quick: bool) -> list[Result]:
    """Measure each depth."""
    return [measure(depth, steps=20 if quick else 200, turns=2 if quick else 25) for depth in DEPTHS]


def measure(depth: int, steps: int, turns: int) -> Result:
    """Measure a model with `depth` linear layers, each followed by a ReLU."""
    contestants = {
        name: Contestant(partial(_loop, depth, steps, guarded))
        for name, guarded in ((UNGUARDED, False), (GUARDED, True))
    }
    _, cpu_seconds = take_measured_turns(contestants, turns)
    return compare(
        f"guards_{depth}",
        f"checks of a custom loop: {depth} layers of width {WIDTH}, {2 * depth + 1} modules, {2 * depth} parameters",
        "CPU us a step",
        {name: [each / steps * 1e6 for each in own] for name, own in cpu_seconds.items()},
        UNGUARDED,
        [_TARGET],
    )


def _loop(depth: int, steps: int, guarded: bool, _: World) -> Turn:
    run = join_quietly(guarded=guarded)
    torch.manual_seed(0)
    layers: list[nn.Module] = [each for _ in range(depth) for each in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    plain = nn.Sequential(*layers)
    model, _optimizer = run.place(plain, torch.optim.SGD(plain.parameters(), lr=0.01, momentum=0.9))
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, WIDTH, generator=generator)
    return _turns(run, model, TensorDataset(inputs, torch.randint(WIDTH, (SAMPLES,), generator=generator)), steps)


def _turns(run: lockstep.Run, model: nn.Module, dataset: TensorDataset, steps: int) -> Callable[[], float]:
    done = 0

    def turn() -> float:
        nonlocal done
        done += steps
        for step in run.steps(dataset, batch=BATCH, microbatches=1, steps=done):
            for inputs, targets in step:
                step.backward(mean=F.cross_entropy(model(inputs), targets))
            step.update()
        return 0.0

    return turn
