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
from lockstep.inference.saved import EvaluationModel, SavedModel
from lockstep.setup.dataset_info import check_dataset_info
from lockstep.setup.examples import get_device_transforms, load_example_batches
from lockstep.tasks.base import Task
from lockstep.training.evaluate import compute_batch_sums, compute_task_metrics


class EvaluatedBatch(NamedTuple):
    """A batch with its sample indices and the model outputs. The batch and the outputs are on the device."""

    sample_indices: NDArray[np.int64]
    batch: Batch
    outputs: Any


@final
@dataclass(frozen=True)
class Validation:
    """An evaluation of a model on the samples `sample_indices` of the validation split."""

    data: DataSet
    split: Split
    task: Task
    sample_indices: NDArray[np.int64]
    model: EvaluationModel
    transforms: DeviceTransforms

    def iterate_batches(self, sums: NamedSums) -> Iterator[EvaluatedBatch]:
        """Evaluate the samples, and yield each batch with its outputs. The loss and metric sums are added to `sums`.

        If `sample_indices` contains all samples, the batches are the same as in an evaluation during training.
        """
        for number, first in enumerate(self._batch_starts):
            indices = self.sample_indices[first : first + self.model.batch_size]
            device_batch = map_tensors(lambda tensor: tensor.to(self.model.device), self.split.fetch(indices, None))
            batch = self.transforms.transform_evaluation_batch(device_batch)
            outputs = self.model(self.task.inputs(batch))
            sums.add(number, compute_batch_sums(self.task, outputs, batch, self.task.weight(batch)))
            yield EvaluatedBatch(indices, batch, outputs)

    def compute_metrics(self, sums: NamedSums) -> dict[str, float]:
        """Return the loss and the metrics of the task over all batches, by metric name."""
        return compute_task_metrics(
            self.task, sums.compute_total(World(ALONE, torch.device("cpu")), len(self._batch_starts))
        )

    @property
    def _batch_starts(self) -> range:
        return range(0, len(self.sample_indices), self.model.batch_size)

    def get_sample_name(self, sample_index: int) -> str:
        """Return the display name of a sample: its index, and its file or row if it has one."""
        return self.data.get_validation_sample_name(sample_index)


def open_validation(saved: SavedModel, max_samples: int) -> Validation:
    """Open the validation data of a run, and select at most `max_samples` evenly spaced samples.

    Data isn't downloaded. Raises UsageError if the data isn't on this machine, if it differs from the data that the run
    was trained on, or if the dataset has no validation split.
    """
    recipe, data = saved.recipe, saved.open_data()
    check_dataset_info(data.facts, saved.stored_dataset_info, saved.path)
    split = data.validation
    if split is None:
        raise UsageError(
            f"{saved.path}: dataset {recipe.data.name} has no validation split to take examples from; remove --examples"
        )
    model = saved.prepare_model()
    task, count = saved.find_task(load_example_batches(recipe, data)[1]), min(max_samples, len(split))
    indices, transforms = np.arange(count) * len(split) // count, get_device_transforms(recipe, data)
    return Validation(data, split, task, indices, model, transforms)
