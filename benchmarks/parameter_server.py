"""Why rings and trees replaced the parameter server: a whole step under it, beside `ddp`, on 2 and 4 processes.

The micro-batches are small, so that there is much to send for what is computed: ResNet-18 has 45 MB of gradients. Both
have the bits of one process, so the difference is the way that the gradients and weights take.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from benchmarks.learners import Work, ours, timed
from benchmarks.processes import Contestant, take_turns
from benchmarks.report import Result, compare

SAMPLES: Final = 4


def results(quick: bool) -> list[Result]:
    """Measure each number of processes."""
    return [time_of(size, 2 if quick else 15) for size in ([2] if quick else [2, 4])]


def time_of(size: int, turns: int) -> Result:
    """Compare the time of a step under both strategies."""
    work = Work("ResNet-18", "SGD", SAMPLES, size)
    names = ("ddp", "parameter_server")
    return compare(
        f"parameter-server-{size}",
        f"step time: ResNet-18 at 32x32, SGD, {size} processes, {size} micro-batches of {SAMPLES}",
        "s a step",
        take_turns({name: Contestant(partial(timed, ours, name, work), size) for name in names}, turns),
        "ddp",
        [],
    )
