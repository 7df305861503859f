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

    `in_memory`: Whether fetching takes no decoding. If True, the loader starts no loader processes.
    """

    in_memory: bool

    def __len__(self) -> int: ...

    def fetch(self, indices: NDArray[np.int64], draw: int | None) -> Batch:
        """Return the samples at `indices` as one batch on the CPU: any tensors, with the samples along dim 0.

        If `draw` is set, all randomness must be a function of (draw, index). If it is None, samples must not be
        augmented. If a sample can't be read, raises TrainingError with the name of its file. With `on_error: skip` in
        the recipe, the sample is returned as zeros instead, which don't count (see `DataSet.skipped`).
        """


@dataclass(frozen=True)
class DataSet:
    """Both splits of a dataset, and the facts about it that tasks and models need.

    - `validation`: If None, nothing is evaluated.
    - `facts`: Must be serializable as JSON. Contains for example `shape`, the shape of a sample as the model sees it,
      and the facts that a task needs (tasks/find.py). Saved in checkpoints.
    - `files`: Functions that return the file of a training sample and of a validation sample by index, for datasets
      whose samples can be skipped.
    - `skipped`: Returns which samples of a batch were skipped, as bool of shape [n].
    - `name`: Returns a description by which a user recognizes a training sample that has no file, such as its row or
      the beginning of its text.
    - `warnings`: One line for each setting that is valid but probably not intended.
    - `question`: If the data can be interpreted in two ways, an error message that tells the user which option to set.
      Only new runs fail with it. A saved run resumes with its interpretation.
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
    """A request for samples. `draw` is the key of their random numbers, or None for no randomness."""

    indices: NDArray[np.int64]
    draw: int | None


class DeviceTransforms(Protocol):
    """Transforms of a fetched batch, which run on its device before the model sees the batch."""

    def prepare(self, batch: Batch, request: Request) -> Batch:
        """Return the tensors to copy to the device for a fetched training batch."""

    def for_training(self, batch: Batch, step: int, index: int) -> Batch:
        """Transform micro-batch `index` of update `step`, once the prepared tensors are on the device."""

    def for_evaluation(self, batch: Batch) -> Batch:
        """Transform an evaluation batch. `batch` is the fetched batch on the device."""


@final
class NoTransforms:
    """A no-op."""

    def prepare(self, batch: Batch, request: Request) -> Batch:
        """See DeviceTransforms."""
        return batch

    def for_training(self, batch: Batch, step: int, index: int) -> Batch:
        """See DeviceTransforms."""
        return batch

    def for_evaluation(self, batch: Batch) -> Batch:
        """See DeviceTransforms."""
        return batch
