"""A saved run's validation data through its model, as an evaluation of the run does it, in this process alone."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray

from lockstep.comm.named_sums import NamedSums
from lockstep.comm.world import World
from lockstep.common.rank import ALONE
from lockstep.core.batch import Batch, map_tensors
from lockstep.data.base import DataSet, DeviceTransforms, Split
from lockstep.errors import UsageError
from lockstep.inference.saved import Computing, SavedModel
from lockstep.setup.data_facts import check_facts
from lockstep.setup.examples import examples, transforms_of
from lockstep.tasks.base import Task
from lockstep.training.evaluate import batch_sums, figures_of


class EvaluatedBatch(NamedTuple):
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

    def batches(self, added: NamedSums) -> Iterator[EvaluatedBatch]:
        """Compute each sample once, in the batches of an evaluation where all are looked at, whose sums are `added`."""
        for number, first in enumerate(self._firsts):
            numbers = self.numbers[first : first + self.computing.batch]
            arrived = map_tensors(lambda tensor: tensor.to(self.computing.device), self.split.fetch(numbers, None))
            batch = self.transforms.for_evaluation(arrived)
            outputs = self.computing(self.task.inputs(batch))
            added.add(number, batch_sums(self.task, outputs, batch, self.task.weight(batch)))
            yield EvaluatedBatch(numbers, batch, outputs)

    def figures(self, added: NamedSums) -> dict[str, float]:
        """Return the loss and the task's figures of all batches, by the names that an evaluation writes."""
        return figures_of(self.task, added.total(World(ALONE, torch.device("cpu")), len(self._firsts)))

    @property
    def _firsts(self) -> range:
        return range(0, len(self.numbers), self.computing.batch)

    def name(self, number: int) -> str:
        """Return what a sample is called: its number, and its file where it has one."""
        file = f" {self.data.files[1](number)}" if self.data.files else ""
        return f"sample {number}{file}"


def open_validation(saved: SavedModel, most: int) -> Validation:
    """Open the validation data of a saved run, and choose at most so many of its samples.

    Nothing is downloaded. UsageError where the data is not here, is not what the run learned from, or has no
    validation part.
    """
    recipe, data = saved.recipe, saved.open_data()
    check_facts(data.facts, saved.known, saved.path)
    split = data.validation
    if split is None:
        raise UsageError(f"{saved.path}: data set {recipe.data.name} has no validation part, so there are no examples")
    computing = saved.computing()
    task, count = saved.task(examples(recipe, data)[1]), min(most, len(split))
    indices, change = np.arange(count) * len(split) // count, transforms_of(recipe, data, computing.device)
    return Validation(data, split, task, indices, computing, change)
