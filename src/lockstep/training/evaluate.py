"""Evaluation: visits every sample once, for any number of processes, and sums the results."""

import time
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from lockstep.comm.named_sums import NamedSums
from lockstep.comm.world import World
from lockstep.core.batch import Batch, length
from lockstep.core.several_losses import Weight, loss_means, loss_sums, with_total
from lockstep.parallel.engine import Engine
from lockstep.tasks.base import Task

LOSS: Final = "loss"
WEIGHT: Final = "weight"
SAMPLES: Final = "samples"


class Totals(NamedTuple):
    """The sums over all batches, on the CPU, and the time of the evaluation in seconds.

    `sums` holds `loss`, `weight`, `samples` and the sums of the task. For several losses, see Task.figures.
    """

    sums: Mapping[str, Tensor]
    seconds: float


def batch_sums(task: Task, outputs: Any, batch: Batch, weight: Weight) -> dict[str, Tensor]:
    """Return the sums of a batch: its losses, weights and number of samples, and the sums of the task."""
    losses = loss_sums(task.loss(outputs, batch), weight)
    return {**losses, SAMPLES: torch.tensor(length(batch)), **task.sums(outputs, batch)}


def figures_of(task: Task, sums: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the loss and the figures of the task, by the names that an evaluation reports.

    The loss comes first, and the mean of each of several losses next.
    """
    sums = with_total(sums)
    figures = task.figures(sums)
    weight = max(int(sums[WEIGHT]), 1) if WEIGHT in sums else 1  # several losses are already divided
    loss = figures.pop(LOSS, float(sums[LOSS]) / weight)
    return {LOSS: loss, **loss_means(sums), **figures}


def evaluate(
    engine: Engine,
    world: World,
    task: Task,
    batches: Iterable[tuple[int | None, Batch, Weight]],
    number_of_batches: int,
    details: bool = False,
) -> Totals:
    """Return the sums over all batches. All ranks call it.

    `batches` are those of this rank, as (number, batch, weight). Each number in range(number_of_batches) is on exactly
    one rank. A batch with the number None is computed but not counted. With `details`, the details of the task are
    summed too (see Task).
    """
    began = time.perf_counter()
    added = NamedSums()
    with engine.evaluation() as predict:
        for number, batch, weight in batches:
            outputs = predict(task.inputs(batch))
            if number is None:
                continue
            detail_sums = task.details(outputs, batch) if details else {}
            added.add(number, {**batch_sums(task, outputs, batch, weight), **detail_sums})
    return Totals(with_total(added.total(world, number_of_batches)), time.perf_counter() - began)
