"""The interface of a dataset: a training and a validation split, each of which fetches a batch by sample indices."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lockstep.core.batch import Batch


class Split(Protocol):
    """The training or the validation part of a dataset.

    `in_memory` says whether samples can be fetched without reading or decoding files. If it is True, the loader doesn't
    start any loader processes.
    """

    in_memory: bool

    def __len__(self) -> int: ...

    def fetch(self, indices: NDArray[np.int64], draw: int | None) -> Batch:
        """Return the samples at `indices` as one batch on the CPU: any tensors, with the samples along dim 0.

        If `draw` is set, all randomness must be a function of (draw, index). If it is None, samples must not be
        augmented. If a sample can't be read, raise TrainingError with the name of its file. With `on_error: skip` in
        the recipe, return the sample as zeros instead, and report it in `DataSet.skipped`.
        """


@dataclass(frozen=True)
class DataSet:
    """The training and validation split of a dataset, and the dataset properties that tasks and models need.

    - `validation`: The validation split. If it is None, evaluations are skipped.
    - `facts`: The dataset properties as JSON-serializable values, which checkpoints save. For example, `shape` is the
      shape of a sample as the model sees it. Each task needs different properties (tasks/find.py).
    - `files`: Two functions that return the file name of a training sample and of a validation sample by index. Set
      this for datasets whose samples can be skipped.
    - `skipped`: Returns a bool tensor of shape [n], which marks the samples of a batch that were skipped.
    - `name`: Returns a description of a training sample that has no file, such as its row or the start of its text.
    - `warnings`: One line for each setting that is valid but probably not intended.
    - `question`: An error message if the data can be interpreted in two ways. It tells the user which option to set.
      Only new runs raise this error. A saved run resumes with its interpretation.
    """

    train: Split
    validation: Split | None
    facts: Mapping[str, Any] = field(default_factory=dict)
    files: tuple[Callable[[int], str], Callable[[int], str]] | None = None
    skipped: Callable[[Batch], Tensor] | None = None
    name: Callable[[int], str] | None = None
    warnings: tuple[str, ...] = ()
    question: str = ""

    def name_of(self, number: int) -> str:
        """Return the display name of a training sample: its index, and its file or description if it has one."""
        name = self.name if self.files is None else self.files[0]
        return f"sample {number}" if name is None else f"sample {number} {name(number)}"


class Request(NamedTuple):
    """A request for the samples at `indices`. `draw` is the key of their random numbers, or None to disable them."""

    indices: NDArray[np.int64]
    draw: int | None


class DeviceTransforms(Protocol):
    """Transforms that run on the device, before the model gets a fetched batch."""

    def prepare(self, batch: Batch, request: Request) -> Batch:
        """Return the tensors to copy to the device for a fetched training batch. Runs on the CPU."""

    def for_training(self, batch: Batch, step: int, index: int) -> Batch:
        """Transform micro-batch `index` of step `step`. `batch` contains the prepared tensors on the device."""

    def for_evaluation(self, batch: Batch) -> Batch:
        """Transform an evaluation batch. `batch` is the fetched batch on the device."""


@final
class NoTransforms:
    """Transforms that leave batches unchanged."""

    def prepare(self, batch: Batch, request: Request) -> Batch:
        """See DeviceTransforms."""
        return batch

    def for_training(self, batch: Batch, step: int, index: int) -> Batch:
        """See DeviceTransforms."""
        return batch

    def for_evaluation(self, batch: Batch) -> Batch:
        """See DeviceTransforms."""
        return batch
