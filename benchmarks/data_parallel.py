"""When to leave `data_parallel` for `ddp`: a whole step under it, beside `single` and `ddp` on 2 processes.

On a CPU, its two replicas share the cores of one process and take turns. What is measured there is what the replicas
cost beside `single`: copies of the gradients to the first, and of the weights back. It is not how much faster several
cards are; that was never measured. All three have the same bits.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from benchmarks.learners import Work, ours, timed
from benchmarks.processes import Contestant, take_measured_turns
from benchmarks.report import Result, compare

SAMPLES: Final = 16
MICROBATCHES: Final = 4
PROCESSES: Final = {"single": 1, "data_parallel": 1, "ddp": 2}


def results(quick: bool) -> list[Result]:
    """Measure the seconds of the clock and of the processor, of the same steps."""
    work = Work("ResNet-18", "SGD", SAMPLES, MICROBATCHES)
    contestants = {name: Contestant(partial(timed, ours, name, work), size) for name, size in PROCESSES.items()}
    seconds, cpu_seconds = take_measured_turns(contestants, 2 if quick else 9)
    title = (
        f"ResNet-18 at 32x32, SGD, {MICROBATCHES} micro-batches of {SAMPLES}; data_parallel with 2 replicas, ddp on 2"
    )
    return [
        compare("data-parallel", f"step time: {title}", "s a step", seconds, "single", []),
        compare("data-parallel-cpu", f"time of the processor: {title}", "CPU s a step", cpu_seconds, "single", []),
    ]
