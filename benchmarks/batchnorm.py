"""What it costs to normalize by the whole step: BatchNorm over all micro-batches beside that over each, in one process.

The model is ResNet-18 at 32x32, with 20 BatchNorm layers, under the strategy `single`. The third contestant is written
by hand: one forward and backward of the whole batch, whose BatchNorm is that of `sync` up to rounding. Time is that of
the processor, since one process waits for nobody; memory is what is in use at most in a step (live_bytes.py), from
before the model is built on; a process first trains with other micro-batches. torch's SyncBatchNorm is not beside
them: it refuses a CPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Final

import torch
from torch.nn import functional as F

from benchmarks.learners import LR, Do, Work, ours
from benchmarks.processes import Contestant, Turn, take_turns, timed
from benchmarks.report import Result, compare
from lockstep.comm.world import World
from lockstep.core.mesh import DataRank
from lockstep.device.live_bytes import LiveByteCounter
from lockstep.device.memory import keep_freed_memory
from lockstep.device.precision import select_deterministic_kernels

LOCAL: Final = "lockstep, local"
SYNC: Final = "lockstep, sync"
WHOLE: Final = "by hand, the whole batch"
_Side = Callable[[Work, World], Do]
_Measure = Callable[[_Side, Work, World], Turn]
_WARM: Final = Work("ResNet-18", "SGD", samples=2, microbatches=2)


def results(quick: bool) -> Iterator[Result]:
    """Measure time, then memory."""
    work = Work("ResNet-18", "SGD", *((4, 2) if quick else (16, 4)))
    yield _compared(work, "time", "s of the processor a step", _timed, turns=2 if quick else 9)
    yield _compared(work, "memory", "MiB", _measured, turns=1 if quick else 3)


def by_hand(work: Work, _: World) -> Do:
    """Return what does a step of the whole batch in one piece, and returns its loss."""
    select_deterministic_kernels(num_threads=1)
    model = work.build().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, foreach=True, **work.options)
    batches = [each.batch for each in work.batches(DataRank())]
    inputs, targets = (torch.cat(each) for each in zip(*batches, strict=True))

    def do() -> torch.Tensor:
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return do


def _compared(work: Work, what: str, unit: str, measured: _Measure, turns: int) -> Result:
    sides = {
        LOCAL: (partial(ours, "single"), work),
        SYNC: (partial(ours, "single"), replace(work, sync_batchnorm=True)),
        WHOLE: (by_hand, work),
    }
    return compare(
        f"batchnorm-{what}-{work.microbatches}-of-{work.samples}",
        f"BatchNorm over a step, {what}: ResNet-18 at 32x32, SGD, {work.microbatches} micro-batches of {work.samples}, "
        f"1 process",
        unit,
        take_turns({name: Contestant(partial(measured, *each)) for name, each in sides.items()}, turns),
        LOCAL,
    )


def _timed(side: _Side, work: Work, world: World) -> Turn:
    keep_freed_memory()
    return timed(side(work, world), world, time.process_time)


def _measured(side: _Side, work: Work, world: World) -> Turn:
    side(replace(_WARM, sync_batchnorm=work.sync_batchnorm), world)()
    live = LiveByteCounter()
    do = side(work, world)
    do()
    return lambda: live.measure_peak(do) / 2**20
