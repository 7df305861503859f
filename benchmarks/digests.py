"""What digests of steps cost: ten steps without them, with one of each step, and at the interval that keeps the price.

Ten steps are what lies between two reports, with which the ranks add up their parts. The small model is an MLP of 50
thousand weights, whose steps are nearly all of Python; the large one has 11 million.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from benchmarks.learners import LR, Work, start
from benchmarks.processes import Contestant, Turn, take_turns, timed
from benchmarks.report import Result, Target, compare
from lockstep.comm.world import World
from lockstep.device.memory import keep_freed_memory
from lockstep.training.digests import StepDigests

OFF, EACH, AUTO = "without digests", "of each step", "run.digest_every=auto"
STEPS: Final = 10
WORKS: Final = {"small": Work("MLP", "SGD", samples=4, microbatches=2), "large": Work("ResNet-18", "SGD", 16, 4)}


def results(quick: bool) -> list[Result]:
    """Measure on 1 process, and on 2 that share the tensors out."""
    cases = [("single", 1), ("ddp", 2)]
    return [
        _compared(size, strategy, processes, 2 if quick else (60 if size == "small" else 5))
        for size in (["small"] if quick else WORKS)
        for strategy, processes in cases
    ]


def _compared(size: str, strategy: str, processes: int, turns: int) -> Result:
    work = WORKS[size]
    contestants = {
        name: Contestant(partial(_timed, strategy, work, every), processes)
        for name, every in ((OFF, 0), (EACH, 1), (AUTO, None))
    }
    return compare(
        f"digests-{size}-{strategy}",
        f"digests: {work.model}, {strategy} on {processes}, {STEPS} steps, micro-batches of {work.samples}",
        "s",
        take_turns(contestants, turns),
        OFF,
        [Target(AUTO, OFF, "at most", 1.01)],  # 0.5 % of the time, and what turns differ by
    )


def _timed(strategy: str, work: Work, every: int | None, world: World) -> Turn:
    """Return a turn; `every` is 0 for no digests, None for the interval that keeps the price."""
    keep_freed_memory()
    engine, given, step = start(strategy, work, world)
    digests = None if every == 0 else StepDigests(world, engine.gradients, lambda _: None, every)
    done = 0

    def do() -> None:
        nonlocal done
        for _ in range(STEPS):
            engine.forward_backward(given, step)
            done += 1
            if digests is not None:
                digests.add(done)
            engine.update(LR, None)
        if digests is not None:
            digests.collect()

    return timed(do, world)
