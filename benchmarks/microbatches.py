"""What several micro-batches on one process cost beside one large batch, and beside accumulation by hand.

The model is ResNet-18 at 32x32 (SGD), 256 samples a step. By hand, the gradients of the parts are accumulated in
`.grad`, with the same deterministic kernels. Lockstep adds them in the order of the tree, under the strategy `single`.
The time is that of the processor, since one process waits for nobody.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.learners import LR, Do, Work, ours
from benchmarks.processes import Contestant, Turn, take_turns, timed
from benchmarks.report import Result, Target, compare
from lockstep.comm.world import World
from lockstep.core.mesh import DataRank
from lockstep.device.memory import keep_freed_memory
from lockstep.device.precision import select_deterministic_kernels

BATCH: Final = 256
PARTS: Final = (4, 8)
ONE: Final = "lockstep, 1 micro-batch"
_LARGEST: Final = {4: 1.05, 8: 1.10}  # what Lockstep may take, times one large batch
_BESIDE_HAND: Final = 1.02  # what it may take, times accumulation by hand


def results(quick: bool) -> Iterator[Result]:
    """Measure 4 and 8 micro-batches, each beside one large batch."""
    batch, turns = (16, 2) if quick else (BATCH, 15)
    for parts in PARTS:
        ours_name, hand_name = f"lockstep, {parts} micro-batches", f"by hand, {parts} parts"
        one, several = (Work("ResNet-18", "SGD", batch // count, count) for count in (1, parts))
        contestants = {
            ONE: Contestant(partial(_timed_ours, one)),
            hand_name: Contestant(partial(_timed_by_hand, several)),
            ours_name: Contestant(partial(_timed_ours, several)),
        }
        targets = [Target(ours_name, ONE, "at most", _LARGEST[parts])]
        targets.append(Target(ours_name, hand_name, "at most", _BESIDE_HAND))
        yield compare(
            f"microbatches-{parts}",
            f"micro-batches: ResNet-18 at 32x32, SGD, {batch} samples a step in {parts} of {batch // parts}, 1 process",
            "s of the processor a step",
            take_turns(contestants, turns),
            ONE,
            targets,
        )


def _timed_ours(work: Work, world: World) -> Turn:
    keep_freed_memory()
    return timed(ours("single", work, world), world, time.process_time)


def _timed_by_hand(work: Work, world: World) -> Turn:
    keep_freed_memory()
    return timed(_by_hand(work), world, time.process_time)


def _by_hand(work: Work) -> Do:
    select_deterministic_kernels(num_threads=1)
    model = work.build().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, foreach=True, **work.options)
    batches = [each.batch for each in work.batches(DataRank())]

    def do() -> Tensor:
        losses = []
        for inputs, targets in batches:
            loss = F.cross_entropy(model(inputs), targets) / len(batches)
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).sum()

    return do
