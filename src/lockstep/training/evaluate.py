"""Evaluation: runs the model on every sample exactly once, with any number of processes, and sums the results."""

import time
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from lockstep.comm.named_sums import NamedSums
from lockstep.comm.world import World
from lockstep.core.batch import Batch, get_batch_size
from lockstep.core.several_losses import Weight, add_total, compute_loss_means, make_loss_sums
from lockstep.parallel.engine import Engine
from lockstep.tasks.base import Task

LOSS: Final = "loss"
WEIGHT: Final = "weight"
SAMPLES: Final = "samples"


class EvaluationTotals(NamedTuple):
    """The sums over all batches of an evaluation, on the CPU, and its duration in seconds.

    `sums` holds `loss`, `weight`, `samples` and the sums of the task. For a task with several losses, see Task.figures.
    """

    sums: Mapping[str, Tensor]
    seconds: float


def compute_batch_sums(task: Task, outputs: Any, batch: Batch, weight: Weight) -> dict[str, Tensor]:
    """Return the sums over a batch: its losses, its weights, the number of samples, and the sums of the task."""
    losses = make_loss_sums(task.loss(outputs, batch), weight)
    return {**losses, SAMPLES: torch.tensor(get_batch_size(batch)), **task.sums(outputs, batch)}


def compute_task_metrics(task: Task, sums: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the loss and the metrics of the task by name, in the format of an `Evaluated` event.

    The loss comes first. If the task has several losses, the mean of each loss comes next.
    """
    sums = add_total(sums)
    figures = task.figures(sums)
    # If several losses have different weights, each loss has already been divided by its weight.
    weight = max(int(sums[WEIGHT]), 1) if WEIGHT in sums else 1
    loss = figures.pop(LOSS, float(sums[LOSS]) / weight)
    return {LOSS: loss, **compute_loss_means(sums), **figures}


def evaluate(
    engine: Engine,
    world: World,
    task: Task,
    batches: Iterable[tuple[int | None, Batch, Weight]],
    num_batches: int,
    details: bool = False,
) -> EvaluationTotals:
    """Evaluate the model, and return the sums over all batches. All ranks call it.

    `batches` yields the batches of this rank as (number, batch, weight). Each number in range(num_batches) occurs on
    exactly one rank. A batch with the number None runs through the model but isn't counted. If `details` is set, the
    result also contains the sums of `task.details`.
    """
    start_time = time.perf_counter()
    named_sums = NamedSums()
    with engine.evaluation() as predict:
        for number, batch, weight in batches:
            outputs = predict(task.inputs(batch))
            if number is None:
                continue
            detail_sums = task.details(outputs, batch) if details else {}
            named_sums.add(number, {**compute_batch_sums(task, outputs, batch, weight), **detail_sums})
    return EvaluationTotals(add_total(named_sums.compute_total(world, num_batches)), time.perf_counter() - start_time)
