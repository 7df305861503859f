"""Evaluation that visits every sample once, whatever the number of processes, and adds counts and sums."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

import torch
from torch import Tensor

from lockstep.parallel.engine import Engine
from lockstep.runtime.world import World
from lockstep.tasks.base import Task

Figures = dict[str, float]


def evaluate(
    engine: Engine,
    world: World,
    task: Task,
    batches: Iterable[tuple[int | None, Tensor, Tensor]],
    number_of_batches: int,
) -> Figures:
    """Return the sums over all batches: `loss`, `samples`, `seconds` and the task's counts. All ranks call it.

    `batches` are this rank's, as (number, inputs, targets): each number in range(number_of_batches) is on one rank, and
    what has none is not counted.
    Every batch has a row of its own in a table of zeros, so adding the tables of all ranks is exact, and the
    rows are added in one order.
    """
    began = time.perf_counter()
    names = ("loss", "samples", *task.count_names)
    rows: dict[int, Tensor] = {}
    with engine.evaluation() as predict:
        for number, inputs, targets in batches:
            outputs = predict(inputs)
            if number is None:
                continue
            loss = task.loss_sum(outputs, targets)
            sums = {"loss": loss, "samples": loss.new_full((), len(inputs), dtype=torch.int64)}
            sums |= task.counts(outputs, targets)
            rows[number] = torch.stack([sums[name].double() for name in names])
    table = torch.zeros(number_of_batches, len(names), dtype=torch.float64)
    if rows:  # one wait for the device, here
        table[list(rows)] = torch.stack([*rows.values()]).cpu()
    figures = [math.fsum(column) for column in world.add_(table).T.tolist()]
    return {**dict(zip(names, figures, strict=True)), "seconds": time.perf_counter() - began}
