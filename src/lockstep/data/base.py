"""What a dataset is to Lockstep: two splits, each of which fetches a batch by sample numbers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lockstep.core.batch import Batch


class Split(Protocol):
    """The training or the validation part of a dataset.

    `in_memory`: fetching costs no decoding, so that no loader process is worth its start.
    """

    in_memory: bool

    def __len__(self) -> int: ...

    def fetch(self, indices: NDArray[np.int64], draw: int | None) -> Batch:
        """Return the samples `indices` as one batch on the CPU: any tensors, with the samples along dim 0.

        With `draw` given, whatever is random is a function of (draw, index); None asks for no augmentation. A sample
        that cannot be read raises TrainingError that names its file, or, where the recipe says skip, comes as zeros
        that count as nothing (see `DataSet.skipped`).
        """


@dataclass(frozen=True)
class DataSet:
    """Both splits and what task and model must know of them; without a validation split nothing is evaluated.

    `facts` are ready for JSON, such as `shape`, that of a sample as the model sees it, and those that a task asks for
    (tasks/find.py); a checkpoint keeps them. `files` give the file of a training and of a validation sample by its
    number, for data of which samples may be skipped, and `skipped` says which of a batch were: bool of shape [n].
    `name` says by what a person finds a training sample that has no file of its own: its row, how its text begins.
    `warnings` are lines on what is legal, and probably not meant. `question` is the text of an error where the data can
    be read in two ways: what the recipe of a new run must say. A saved run resumes as it began.
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
        """Return what a training sample is called: its number, and by what a person finds it."""
        name = self.name if self.files is None else self.files[0]
        return f"sample {number}" if name is None else f"sample {number} {name(number)}"


class Request(NamedTuple):
    """Samples to fetch; `draw` is the key of their random numbers, None for none."""

    indices: NDArray[np.int64]
    draw: int | None


class DeviceTransforms(Protocol):
    """What is done to a fetched batch before the model sees it, on its device."""

    def prepare(self, fetched: Batch, request: Request) -> Batch:
        """Return what travels to the device of a fetched batch of training."""

    def for_training(self, arrived: Batch, step: int, index: int) -> Batch:
        """Transform micro-batch `index` of update `step`."""

    def for_evaluation(self, arrived: Batch) -> Batch:
        """Transform a batch of evaluation, of which what was fetched has arrived."""


@final
class NoTransforms:
    """Does nothing."""

    def prepare(self, fetched: Batch, request: Request) -> Batch:
        """See DeviceTransforms."""
        return fetched

    def for_training(self, arrived: Batch, step: int, index: int) -> Batch:
        """See DeviceTransforms."""
        return arrived

    def for_evaluation(self, arrived: Batch) -> Batch:
        """See DeviceTransforms."""
        return arrived
