"""Evaluation: runs the model on every sample exactly once, with any number of processes, and sums the results."""

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
    """The sums over all batches, on the CPU, and the duration of the evaluation in seconds.

    `sums` holds `loss`, `weight`, `samples` and the sums of the task. For several losses, see Task.figures.
    """

    sums: Mapping[str, Tensor]
    seconds: float


def batch_sums(task: Task, outputs: Any, batch: Batch, weight: Weight) -> dict[str, Tensor]:
    """Return the sums of a batch: its losses, weights and number of samples, and the sums of the task."""
    losses = loss_sums(task.loss(outputs, batch), weight)
    return {**losses, SAMPLES: torch.tensor(length(batch)), **task.sums(outputs, batch)}


def task_metrics(task: Task, sums: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the loss and the metrics of the task by name, in the format of an evaluation event.

    The loss comes first, followed by the mean of each of several losses.
    """
    sums = with_total(sums)
    figures = task.figures(sums)
    # Without a common weight, each of several losses is already divided by its own weight.
    weight = max(int(sums[WEIGHT]), 1) if WEIGHT in sums else 1
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
    """Evaluate the model, and return the sums over all batches. All ranks call it.

    `batches` yields the batches of this rank as (number, batch, weight). Each number in range(number_of_batches) occurs
    on exactly one rank. A batch with the number None is computed, but doesn't count. With `details`, the details of the
    task are summed too (see Task).
    """
    start_time = time.perf_counter()
    added = NamedSums()
    with engine.evaluation() as predict:
        for number, batch, weight in batches:
            outputs = predict(task.inputs(batch))
            if number is None:
                continue
            detail_sums = task.details(outputs, batch) if details else {}
            added.add(number, {**batch_sums(task, outputs, batch, weight), **detail_sums})
    return Totals(with_total(added.total(world, number_of_batches)), time.perf_counter() - start_time)
