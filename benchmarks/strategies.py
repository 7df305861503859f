"""What cutting a model costs: a whole step and the memory of each strategy, against torch's own and against theory.

Both train on the same micro-batches, one on each process of one thread, and four in all in a pipeline: torchvision's
ResNet-18 by SGD with momentum, timm's vit_tiny by AdamW. Both keep freed memory. What is compared with what stands in
learners.py; memory is in strategies_memory.py.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from benchmarks import strategies_memory
from benchmarks.learners import Work, ours, timed, torchs
from benchmarks.pipelines import SCHEDULES
from benchmarks.processes import Contestant, take_turns
from benchmarks.report import Result, Target, compare

PROCESSES: Final = {"zero1": 2, "zero2": 2, "zero3": 2, "hsdp": 4} | {f"pipeline-{each}": 2 for each in SCHEDULES}
SLOWER: Final = 1.10  # at most so many times torch's


def results(quick: bool) -> list[Result]:
    """Measure time, then memory."""
    turns = 2 if quick else 15
    models = ["ViT-Tiny"] if quick else ["ResNet-18", "ViT-Tiny"]
    return [
        *(time_of(name, model, turns) for model in models for name in PROCESSES),
        *strategies_memory.results(quick),
    ]


def time_of(name: str, model: str, turns: int) -> Result:
    """Compare the time of a step under our strategy `name` with that of torch's counterpart."""
    size = PROCESSES[name]
    optimizer, samples = ("SGD", 64) if model == "ResNet-18" else ("AdamW", 16)
    count = 4 if name.startswith("pipeline") else size
    work = Work(model, optimizer, samples, count)
    mine, theirs = f"lockstep {name}", f"torch's {name}"
    contestants = {
        theirs: Contestant(partial(timed, torchs, name, work), size),
        mine: Contestant(partial(timed, ours, name, work), size),
    }
    return compare(
        f"strategies-time-{name}-{model}",
        f"step time: {name}, {model} at 32x32, {optimizer}, {size} processes, {count} micro-batches of {samples}",
        "s a step",
        take_turns(contestants, turns),
        theirs,
        [Target(mine, theirs, "at most", SLOWER)],
    )
