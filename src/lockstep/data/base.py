"""What a data set is to Lockstep: two splits, each of which fetches a batch by sample numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


class Split(Protocol):
    """The training or the validation part of a data set.

    `in_memory` says that fetching costs no decoding, so that no loader process is worth its start.
    """

    in_memory: bool

    def __len__(self) -> int: ...

    def fetch(self, indices: NDArray[np.int64], draw: int | None) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of the samples `indices`, on the CPU.

        Images are uint8 of shape [n, channels, height, width], targets int64 of shape [n]; other data is what
        the user's data set gives, stacked. With `draw` given, whatever is random is a function of (draw, index);
        None asks for no augmentation. A sample that cannot be read raises TrainingError that names its file, or,
        where the recipe says skip, comes as zeros with target SKIPPED (tasks/base.py).
        """
        ...


@dataclass(frozen=True)
class DataSet:
    """Both splits and what the model must know of them.

    `mean` and `std` are for each channel, of values in [0, 1]; None for data that is not images.
    `shape` is that of one sample as the model sees it. `files` give the file of a training and of a validation sample
    by its number, for data of which samples may be skipped.
    """

    train: Split
    validation: Split
    classes: Sequence[str]
    shape: tuple[int, ...]
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    files: tuple[Callable[[int], str], Callable[[int], str]] | None = None
