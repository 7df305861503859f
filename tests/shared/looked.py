"""Validation data of a test's own, what a model gave for it, without a checkpoint, and what a thumbnail shows."""

import base64
import io

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from lockstep.core.batch import Batch, map_tensors
from lockstep.data.base import DataSet, NoTransforms
from lockstep.inference.validation_pass import EvaluatedBatch, Validation
from lockstep.tasks.base import Task


class Held:
    """A split of samples that a batch holds."""

    in_memory = True

    def __init__(self, batch: Batch, samples: int) -> None:
        self._batch = batch
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def fetch(self, indices: NDArray[np.int64], draw: int | None) -> Batch:
        return map_tensors(lambda tensor: tensor[torch.from_numpy(indices)], self._batch)


def validation(task: Task, batch: Batch, samples: int) -> Validation:
    """Return all samples of a batch as validation data; there is no model."""
    held = Held(batch, samples)
    return Validation(DataSet(held, held), held, task, np.arange(samples), None, NoTransforms())  # type: ignore[arg-type]


def evaluated(batch: Batch, outputs: Tensor, first: int = 0) -> EvaluatedBatch:
    return EvaluatedBatch(np.arange(first, first + len(outputs)), batch, outputs)


def pixels(source: str) -> Tensor:
    """Return the pixels of a data: URI, of shape [height, width] or [height, width, 3]."""
    kind, _, content = source.partition(",")
    assert kind == "data:image/png;base64"
    with Image.open(io.BytesIO(base64.b64decode(content))) as shown:
        return torch.from_numpy(np.asarray(shown).copy())
