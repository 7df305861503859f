"""What an audit costs: a step that is audited beside one that is not, on 2 processes.

The repeated micro-batch is 1 of those that a rank has in a step, so an audit costs less the more it has: 1 is the
worst, 4 is what `recipe.microbatches` gives to 2 processes when left out. With `placement.audit_every=100`, 1 % of the
time is the time of one step; so an audited step may take at most twice as long.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any, Final

from benchmarks.learners import LR, Work, start
from benchmarks.processes import Contestant, Turn, take_turns, timed
from benchmarks.report import Result, Target, compare
from lockstep.comm.world import World
from lockstep.core.audit_schedule import AuditSchedule
from lockstep.device.memory import keep_freed_memory
from lockstep.parallel.audited import AuditedEngine

STEP, AUDITED = "a step", "an audited step"
SIZE: Final = 2
WORKS: Final = (
    Work("ResNet-18", "SGD", samples=64, microbatches=SIZE),
    Work("ResNet-18", "SGD", samples=64, microbatches=4 * SIZE),
)


def results(quick: bool) -> list[Result]:
    """Measure a strategy whose tensors are whole and one whose tensors are cut."""
    works = WORKS[:1] if quick else WORKS
    return [_compared(name, work, turns=2 if quick else 9) for name in ("ddp", "zero3") for work in works]


def _compared(name: str, work: Work, turns: int) -> Result:
    contestants = {
        STEP: Contestant(partial(_timed, name, work, False), SIZE),
        AUDITED: Contestant(partial(_timed, name, work, True), SIZE),
    }
    return compare(
        f"audit-{name}-{work.model}-{work.microbatches}-microbatches",
        f"audit: {name}, {work.model} at 32x32, {work.optimizer}, {SIZE} processes, {work.microbatches} micro-batches "
        f"of {work.samples}",
        "s",
        take_turns(contestants, turns),
        STEP,
        [Target(AUDITED, STEP, "at most", 2.0)],
    )


def _timed(name: str, work: Work, audited: bool, world: World) -> Turn:
    keep_freed_memory()
    engine: Any
    engine, given, step = start(name, work, world)
    if audited:
        strategy = import_module(f"lockstep.strategies.{name}").Strategy()
        rota = AuditSchedule(1, strategy.mesh(SIZE), work.microbatches)
        index = rota.assignment(world.rank, step)
        assert index is not None
        given = [replace(work.batch(index), dummy=True), *given]
        engine = AuditedEngine(engine, world, rota, work.batch)

    def do() -> None:
        engine.forward_backward(given, step)
        engine.update(LR, None)

    return timed(do, world)
