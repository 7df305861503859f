"""A saved run's validation data through its model, as an evaluation of the run does it, in this process alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.core.batch import Batch, length, mapped
from lockstep.data.base import DataSet, DeviceTransforms, Split
from lockstep.errors import UsageError
from lockstep.inference.saved import Computing, Saved
from lockstep.run.build import open_recipe_data
from lockstep.run.examples import examples, transforms_of
from lockstep.run.facts import check_facts
from lockstep.tasks.base import Task
from lockstep.training.evaluate import LOSS, SAMPLES, WEIGHT


class Visited(NamedTuple):
    """Samples by their `numbers`, as the model saw them, and what it gave for them; both are on its device."""

    numbers: NDArray[np.int64]
    batch: Batch
    outputs: Any


@final
@dataclass(frozen=True)
class Validation:
    """The samples that are looked at, `numbers` of those of `split`: all, or some at equal distances."""

    data: DataSet
    split: Split
    task: Task
    numbers: NDArray[np.int64]
    computing: Computing
    transforms: DeviceTransforms

    def visited(self) -> Iterator[Visited]:
        """Compute each sample once, in the batches of an evaluation where all are looked at."""
        for first in range(0, len(self.numbers), self.computing.batch):
            numbers = self.numbers[first : first + self.computing.batch]
            arrived = mapped(lambda tensor: tensor.to(self.computing.device), self.split.fetch(numbers, None))
            batch = self.transforms.for_evaluation(arrived)
            yield Visited(numbers, batch, self.computing(self.task.inputs(batch)))

    def name(self, number: int) -> str:
        """Return what a sample is called: its number, and its file where it has one."""
        file = f" {self.data.files[1](number)}" if self.data.files else ""
        return f"sample {number}{file}"


@final
class Totals:
    """The sums of an evaluation, added as the run adds them: whole numbers exactly, others rounded once."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._parts: dict[str, list[Tensor]] = {}

    def add(self, visited: Visited) -> None:
        """Take the sums of a batch."""
        outputs, batch = visited.outputs, visited.batch
        counts = {WEIGHT: torch.tensor(self._task.weight(batch)), SAMPLES: torch.tensor(length(batch))}
        for name, value in {LOSS: self._task.loss(outputs, batch), **counts, **self._task.sums(outputs, batch)}.items():
            self._parts.setdefault(name, []).append(value.detach().cpu())

    def sums(self) -> Mapping[str, Tensor]:
        """Return the sums, on the CPU."""
        return {name: _added(parts) for name, parts in self._parts.items()}

    def figures(self) -> dict[str, float]:
        """Return the loss and the task's figures, by the names that an evaluation writes."""
        sums = self.sums()
        figures = self._task.figures(sums)
        loss = figures.pop(LOSS, float(sums[LOSS]) / max(int(sums[WEIGHT]), 1))
        return {LOSS: loss, **figures}


def validation_of(saved: Saved, most: int) -> Validation:
    """Open the validation data of a saved run, and choose at most so many of its samples.

    Nothing is downloaded. UsageError where the data is not here, is not what the run learned from, or has no
    validation part.
    """
    recipe = saved.recipe
    recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"download": False})})
    data = open_recipe_data(recipe)
    check_facts(data.facts, saved.known, saved.path)
    split = data.validation
    if split is None:
        raise UsageError(f"{saved.path}: data set {recipe.data.name} has no validation part, so there are no examples")
    computing = saved.computing()
    return Validation(
        data,
        split,
        saved.task(examples(recipe, data)[1]),
        np.arange(min(most, len(split))) * len(split) // min(most, len(split)),
        computing,
        transforms_of(recipe, data, computing.device),
    )


def _added(parts: Sequence[Tensor]) -> Tensor:
    table = torch.stack(list(parts))
    if not table.is_floating_point():
        return table.sum(0)
    columns = table.double().reshape(len(parts), -1).T.tolist()
    return torch.tensor([math.fsum(column) for column in columns], dtype=torch.float64).reshape(table.shape[1:])
