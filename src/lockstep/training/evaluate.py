"""Evaluation that visits every sample once, whatever the number of processes, and adds sums."""

import time
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from lockstep.comm.named_sums import NamedSums
from lockstep.comm.world import World
from lockstep.core.batch import Batch, length
from lockstep.parallel.engine import Engine
from lockstep.tasks.base import Task

LOSS: Final = "loss"
WEIGHT: Final = "weight"
SAMPLES: Final = "samples"


class Totals(NamedTuple):
    """The sums over all batches, on the CPU: `loss`, `weight`, `samples` and the task's own; and the time it took."""

    sums: Mapping[str, Tensor]
    seconds: float


def batch_sums(task: Task, outputs: Any, batch: Batch, weight: int) -> dict[str, Tensor]:
    """Return what a batch adds to an evaluation: its loss, weight and samples, and the task's own sums."""
    counts = {WEIGHT: torch.tensor(weight), SAMPLES: torch.tensor(length(batch))}
    return {LOSS: task.loss(outputs, batch), **counts, **task.sums(outputs, batch)}


def figures_of(task: Task, sums: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the loss and the task's figures, by the names that an evaluation writes."""
    figures = task.figures(sums)
    loss = figures.pop(LOSS, float(sums[LOSS]) / max(int(sums[WEIGHT]), 1))
    return {LOSS: loss, **figures}


def evaluate(
    engine: Engine,
    world: World,
    task: Task,
    batches: Iterable[tuple[int | None, Batch, int]],
    number_of_batches: int,
    details: bool = False,
) -> Totals:
    """Return the sums over all batches. All ranks call it.

    `batches` are this rank's, as (number, batch, weight): each number in range(number_of_batches) is on one rank, and
    what has none is not counted.
    With `details` the task's are added too (see Task).
    """
    began = time.perf_counter()
    added = NamedSums()
    with engine.evaluation() as predict:
        for number, batch, weight in batches:
            outputs = predict(task.inputs(batch))
            if number is None:
                continue
            own = task.details(outputs, batch) if details else {}
            added.add(number, {**batch_sums(task, outputs, batch, weight), **own})
    return Totals(added.total(world, number_of_batches), time.perf_counter() - began)
