"""Evaluation that visits every sample once, whatever the number of processes, and adds sums."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from lockstep.core.batch import Batch, length
from lockstep.parallel.engine import Engine
from lockstep.runtime.world import World
from lockstep.tasks.base import Task

LOSS: Final = "loss"
WEIGHT: Final = "weight"
SAMPLES: Final = "samples"


class Totals(NamedTuple):
    """The sums over all batches, on the CPU: `loss`, `weight`, `samples` and the task's own; and the time it took."""

    sums: Mapping[str, Tensor]
    seconds: float


def evaluate(
    engine: Engine,
    world: World,
    task: Task,
    batches: Iterable[tuple[int | None, Batch, int]],
    number_of_batches: int,
) -> Totals:
    """Return the sums over all batches. All ranks call it.

    `batches` are this rank's, as (number, batch, weight): each number in range(number_of_batches) is on one rank, and
    what has none is not counted.
    Whole numbers are added as they come, since their sum is exact in any order. Of what is not whole every batch has a
    row of its own in a table of zeros, so adding the tables of all ranks is exact, and the rows are added in one order.
    """
    began = time.perf_counter()
    whole: dict[str, Tensor] = {}
    rows: dict[int, dict[str, Tensor]] = {}
    with engine.evaluation() as predict:
        for number, batch, weight in batches:
            outputs = predict(task.inputs(batch))
            if number is None:
                continue
            loss = task.loss(outputs, batch)
            counts = {WEIGHT: torch.tensor(weight), SAMPLES: torch.tensor(length(batch))}
            sums = {LOSS: loss, **counts, **task.sums(outputs, batch)}
            rows[number] = {name: each.double() for name, each in sums.items() if each.is_floating_point()}
            for name, each in sums.items():
                if name not in rows[number]:
                    whole[name] = whole[name] + each if name in whole else each.long()
    return Totals(add_over_ranks(world, whole, rows, number_of_batches), time.perf_counter() - began)


def add_over_ranks(
    world: World, whole: Mapping[str, Tensor], rows: Mapping[int, Mapping[str, Tensor]], number_of_batches: int
) -> dict[str, Tensor]:
    """Add `whole` numbers, and `rows` by the numbers of their batches, over the ranks.

    A rank without a batch learns from the others what there is to add.
    """
    first = next(iter(rows.values()), {})
    own = [{name: list(each.shape) for name, each in kind.items()} for kind in (whole, first)]
    of_whole, of_rows = _agreed(world, own)
    sums = {name: world.add_(_laid(whole.get(name), shape, torch.int64)) for name, shape in of_whole.items()}
    for name, shape in of_rows.items():
        table = torch.zeros(number_of_batches, *shape, dtype=torch.float64)
        if rows:
            table[list(rows)] = torch.stack([row[name] for row in rows.values()]).cpu()
        sums[name] = _added_rows(world.add_(table))
    return sums


def _agreed(world: World, own: list[dict[str, Any]]) -> list[dict[str, Any]]:
    of_all: list[list[dict[str, Any]]] = [json.loads(text) for text in world.all_tell(json.dumps(own))]
    return next((each for each in of_all if any(each)), own)


def _laid(value: Tensor | None, shape: list[int], dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=dtype) if value is None else value.to("cpu", dtype).clone()


def _added_rows(table: Tensor) -> Tensor:
    """Add the rows of a table, rounded once: torch's own sum has an order that follows from the shape."""
    columns = table.reshape(len(table), -1).T.tolist()
    return torch.tensor([math.fsum(column) for column in columns], dtype=torch.float64).reshape(table.shape[1:])
