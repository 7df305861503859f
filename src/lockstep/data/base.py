"""The interface of a dataset with a training and a validation split. A split fetches batches by sample indices."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lockstep.core.batch import Batch


class Split(Protocol):
    """A training or validation split of a dataset.

    Set `in_memory` to True if samples can be fetched without reading or decoding files. In this case, no loader
    processes are started.
    """

    in_memory: bool

    def __len__(self) -> int: ...

    def fetch(self, indices: NDArray[np.int64], random_key: int | None) -> Batch:
        """Return the samples at `indices` as a batch on the CPU. A batch is any structure of tensors of shape [n, ...].

        If `random_key` is set, random augmentations must depend only on `random_key` and the sample index. If
        `random_key` is None, don't augment samples. If a sample can't be read, raise TrainingError with the name of its
        file. With `on_error: skip` in the recipe, return the sample as zeros instead, and report it in
        `DataSet.skipped`.
        """


@dataclass(frozen=True)
class DataSet:
    """A dataset with its training and validation splits, and the properties that tasks and models need.

    - `validation`: The validation split. If it is None, evaluations are skipped.
    - `facts`: The dataset properties as JSON-serializable values, which are saved in checkpoints. For example, `shape`
      is the shape of the samples that the model receives. See tasks/find.py for the properties that each task needs.
    - `files`: Two functions that return the file name of a sample by index, the first for the training split, and the
      second for the validation split. Set this for datasets whose samples can be skipped.
    - `skipped`: Takes a batch, and returns a bool tensor of shape [n] that marks the samples that were skipped.
    - `name`: Returns a description of a training sample that has no file, such as its row or the start of its text.
    - `validation_name`: The same for a validation sample.
    - `warnings`: A warning for each setting that is valid but probably not intended.
    - `question`: An error message if the data can be interpreted in two ways. It tells the user which option to set.
      Only new runs raise this error. A resumed run keeps the interpretation that was saved.
    """

    train: Split
    validation: Split | None
    facts: Mapping[str, Any] = field(default_factory=dict)
    files: tuple[Callable[[int], str], Callable[[int], str]] | None = None
    skipped: Callable[[Batch], Tensor] | None = None
    name: Callable[[int], str] | None = None
    validation_name: Callable[[int], str] | None = None
    warnings: tuple[str, ...] = ()
    question: str = ""

    def get_sample_name(self, index: int) -> str:
        """Return the display name of a training sample: its index, and its file or description if it has one."""
        return _format_sample_name(index, self.name if self.files is None else self.files[0])

    def get_validation_sample_name(self, index: int) -> str:
        """Return the display name of a validation sample, like `get_sample_name`."""
        return _format_sample_name(index, self.validation_name if self.files is None else self.files[1])


def _format_sample_name(index: int, get_name: Callable[[int], str] | None) -> str:
    return f"sample {index}" if get_name is None else f"sample {index} {get_name(index)}"


class Request(NamedTuple):
    """A request for the samples at `indices`.

    `random_key` is the key for random augmentations, or None to disable them.
    """

    indices: NDArray[np.int64]
    random_key: int | None


class DeviceTransforms(Protocol):
    """Transforms of a fetched batch that run on the device, before the batch is passed to the model."""

    def prepare(self, batch: Batch, request: Request) -> Batch:
        """Prepare a fetched training batch on the CPU. Return the tensors to copy to the device."""

    def transform_training_batch(self, batch: Batch, step: int, index: int) -> Batch:
        """Transform a training batch. `batch` is the result of `prepare`, copied to the device.

        `index` is the index of the micro-batch in step `step`.
        """

    def transform_evaluation_batch(self, batch: Batch) -> Batch:
        """Transform an evaluation batch, which is on the device and hasn't been passed to `prepare`."""


@final
class NoTransforms:
    """Device transforms that return batches unchanged."""

    def prepare(self, batch: Batch, request: Request) -> Batch:
        """See DeviceTransforms."""
        return batch

    def transform_training_batch(self, batch: Batch, step: int, index: int) -> Batch:
        """See DeviceTransforms."""
        return batch

    def transform_evaluation_batch(self, batch: Batch) -> Batch:
        """See DeviceTransforms."""
        return batch
