"""The strategy `deepspeed` beside our own of the same stage: a step's time, and the memory of a rank.

Both train what strategies.py does, on the same micro-batches, one on each of 2 processes of one thread. Memory is what
a rank has in use at most in a step (live_bytes.py), from before the model is built on, with DeepSpeed imported by then.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final

from benchmarks.learners import Work, ours, timed
from benchmarks.processes import Contestant, Turn, take_turns
from benchmarks.report import Result, Target, compare
from lockstep.comm.deepspeed import init_deepspeed
from lockstep.comm.world import World
from lockstep.device.live_bytes import LiveByteCounter

STAGES: Final = (1, 2, 3)
SIZE: Final = 2
MOST: Final = 1.10  # at most so many times what DeepSpeed takes
WORKS: Final = {
    "ResNet-18, SGD": Work("ResNet-18", "SGD", 64, SIZE),
    "ViT-Tiny, AdamW": Work("ViT-Tiny", "AdamW", 16, SIZE),
}


def results(quick: bool) -> Iterator[Result]:
    """Measure time, then memory."""
    works = {"ViT-Tiny, AdamW": Work("ViT-Tiny", "AdamW", 1, SIZE)} if quick else WORKS
    turns = 2 if quick else 7
    yield from (_compared("time", stage, name, work, turns) for name, work in works.items() for stage in STAGES)
    yield from (
        _compared("memory", stage, name, work, 1 if quick else 3) for name, work in works.items() for stage in STAGES
    )


def _compared(what: str, stage: int, name: str, work: Work, turns: int) -> Result:
    start = partial(timed, ours) if what == "time" else _measured
    sides = {f"lockstep {kind}": partial(start, kind, work) for kind in (f"deepspeed-{stage}", f"zero{stage}")}
    theirs, mine = sides
    return compare(
        f"deepspeed-{what}-{stage}-{work.model}",
        f"{what} of a step: stage {stage}, {name}, 32x32, {SIZE} processes, {SIZE} micro-batches of {work.samples}",
        "s a step" if what == "time" else "MiB, the largest rank",
        take_turns({side: Contestant(begin, SIZE) for side, begin in sides.items()}, turns),
        theirs,
        [Target(mine, theirs, "at most", MOST)],
    )


def _measured(name: str, work: Work, world: World) -> Turn:
    init_deepspeed(world)
    live = LiveByteCounter()
    do = ours(name, work, world)
    do()
    return lambda: live.measure_peak(do) / 2**20
