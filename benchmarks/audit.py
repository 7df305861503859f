"""What an audit costs: a step that is audited beside one that is not, on 2 processes.

The repeated micro-batch is 1 of those that a rank has in a step, so an audit costs less the more it has: 1 is the
worst, 4 is what a batch of 256 gives to 2 processes by default. With `placement.audit_every=100`, 1 % of the
time is the time of one step; so an audited step may take at most twice as long. In a pipeline all of it is done twice,
and weights travel before: it may take half a step more.
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
from lockstep.core.engine_recipe import PlainRecipe
from lockstep.device.memory import keep_freed_memory
from lockstep.parallel.audited import AuditedEngine
from lockstep.parallel.numerics import Numerics
from lockstep.parallel.rotated_audit import RotatedAudit

STEP, AUDITED = "a step", "an audited step"
SIZE: Final = 2
WORKS: Final = (
    Work("ResNet-18", "SGD", samples=64, microbatches=SIZE),
    Work("ResNet-18", "SGD", samples=64, microbatches=4 * SIZE),
)


def results(quick: bool) -> list[Result]:
    """Measure a strategy whose tensors are whole, one whose tensors are cut, and one whose model is."""
    works = WORKS[:1] if quick else WORKS
    names = ("ddp", "zero3", "pipeline")
    return [_compared(name, work, turns=2 if quick else 9) for name in names for work in works]


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
        [Target(AUDITED, STEP, "at most", 2.0 if name != "pipeline" else 2.5)],
    )


def _timed(name: str, work: Work, audited: bool, world: World) -> Turn:
    keep_freed_memory()
    engine: Any
    engine, given, step = start(name, work, world)
    strategy = import_module(f"lockstep.strategies.{name}").Strategy()
    rota = AuditSchedule(1, strategy.mesh(SIZE), work.microbatches)
    if audited and name == "pipeline":
        engine.close()
        numerics = Numerics(PlainRecipe(microbatches=work.microbatches))
        engine = RotatedAudit(
            lambda other, _: start(name, work, other)[0], world, numerics, rota, lambda _, index: work.batch(index)
        )
    elif audited:
        index = rota.get_assignment(world.rank, step)
        assert index is not None
        given = [replace(work.batch(index), is_dummy=True), *given]
        engine.close()
        engine = AuditedEngine(
            lambda other: start(name, work, other)[0], world, rota, lambda _, index: work.batch(index)
        )

    def do() -> None:
        engine.forward_backward(given, step)
        engine.update(LR, None)

    return timed(do, world)
