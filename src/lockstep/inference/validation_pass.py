"""Evaluates the model of a saved run on its validation data, in a single process."""

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
from lockstep.training.evaluate import batch_sums, task_metrics


class EvaluatedBatch(NamedTuple):
    """The sample indices of a batch, the batch, and the outputs. The batch and the outputs are on the device."""

    numbers: NDArray[np.int64]
    batch: Batch
    outputs: Any


@final
@dataclass(frozen=True)
class Validation:
    """The validation samples to evaluate. `numbers` are their indices in `split`, either all or evenly spaced."""

    data: DataSet
    split: Split
    task: Task
    numbers: NDArray[np.int64]
    computing: Computing
    transforms: DeviceTransforms

    def batches(self, sums: NamedSums) -> Iterator[EvaluatedBatch]:
        """Evaluate each sample once. Yield each batch with its outputs, and add the sums of the batch to `sums`.

        If all samples are evaluated, the batches are the same as in an evaluation of the run.
        """
        for number, first in enumerate(self._firsts):
            numbers = self.numbers[first : first + self.computing.batch]
            arrived = map_tensors(lambda tensor: tensor.to(self.computing.device), self.split.fetch(numbers, None))
            batch = self.transforms.for_evaluation(arrived)
            outputs = self.computing(self.task.inputs(batch))
            sums.add(number, batch_sums(self.task, outputs, batch, self.task.weight(batch)))
            yield EvaluatedBatch(numbers, batch, outputs)

    def figures(self, sums: NamedSums) -> dict[str, float]:
        """Return the loss and the metrics of the task over all batches, by their names in the event log."""
        return task_metrics(self.task, sums.total(World(ALONE, torch.device("cpu")), len(self._firsts)))

    @property
    def _firsts(self) -> range:
        return range(0, len(self.numbers), self.computing.batch)

    def name(self, number: int) -> str:
        """Return the name of a sample: its index, and its file if the sample comes from a file."""
        file = f" {self.data.files[1](number)}" if self.data.files else ""
        return f"sample {number}{file}"


def open_validation(saved: SavedModel, limit: int) -> Validation:
    """Open the validation data of a saved run, and select at most `limit` samples.

    Data isn't downloaded. Raises UsageError if the data isn't on this machine, differs from the data that the run was
    trained on, or has no validation split.
    """
    recipe, data = saved.recipe, saved.open_data()
    check_facts(data.facts, saved.known, saved.path)
    split = data.validation
    if split is None:
        raise UsageError(f"{saved.path}: dataset {recipe.data.name} has no validation split to take examples from")
    computing = saved.computing()
    task, count = saved.task(examples(recipe, data)[1]), min(limit, len(split))
    indices, change = np.arange(count) * len(split) // count, transforms_of(recipe, data)
    return Validation(data, split, task, indices, computing, change)
