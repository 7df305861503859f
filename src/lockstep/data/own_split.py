"""Splits of the user's own making: their samples, or their batches, as tensors that are looked at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lockstep.common.own_code import OwnCode
from lockstep.core import random
from lockstep.core.batch import Batch, mapped
from lockstep.data.base import Split
from lockstep.data.collate import checked, stacked
from lockstep.data.items import seed_generators
from lockstep.tasks.facts import check_pair

Collate = Callable[[list[Any]], Any]


@final
class ImportedSplit:
    """The samples of a user's data set as batches: by `collate`, else stacked. What is wrong raises UsageError."""

    in_memory: bool = False

    def __init__(self, label: str, dataset: Any, names: Sequence[str], collate: Collate | None) -> None:
        self._label = label
        self.dataset = dataset
        self._names = names
        self._collate = collate
        self._length = _length(label, dataset)  # as it is now: all that is planned follows from it

    def __len__(self) -> int:
        return self._length

    def fetch(self, indices: NDArray[np.int64], draw: int | None) -> Batch:
        """See Split."""
        if not len(indices):  # what has no samples still has their structure
            return mapped(lambda tensor: tensor[:0], self.fetch(np.array([0]), draw))
        numbers = indices.tolist()
        samples = [self._sample(index, draw) for index in numbers]
        batch = _pair(
            stacked(self._label, samples, numbers) if self._collate is None else self._own(samples, numbers, draw)
        )
        check_pair(self._label, batch, numbers, self._names)
        return batch

    def _sample(self, index: int, draw: int | None) -> Any:
        seed_generators(random.key(random.SAMPLE, draw or 0, index))
        with OwnCode(f"{self._label} sample {index}"):
            return self.dataset[index]

    def _own(self, samples: list[Any], numbers: list[int], draw: int | None) -> Batch:
        assert self._collate is not None
        seed_generators(random.key(random.SAMPLE, draw or 0, numbers[0], 1))  # it may draw, such as what is masked
        label = f"{self._label}: collate of samples {_shown(numbers)}"
        with OwnCode(label):
            return checked(label, self._collate(samples), len(samples))


@final
class OwnSplit:
    """A split of the user's own making, whose answers are looked at before they go on."""

    def __init__(self, label: str, split: Split) -> None:
        self.in_memory = bool(split.in_memory)
        self._label = label
        self.split = split
        self._length = _length(label, split)

    def __len__(self) -> int:
        return self._length

    def fetch(self, indices: NDArray[np.int64], draw: int | None) -> Batch:
        """See Split."""
        with OwnCode(f"{self._label}: fetch"):
            return _pair(checked(f"{self._label}: fetch", self.split.fetch(indices, draw), len(indices)))


def _pair(batch: Batch) -> Batch:
    """Return a pair as a tuple whose targets, where they are whole numbers, are int64; all else as it is."""
    if not isinstance(batch, tuple | list) or len(batch) != 2 or not isinstance(batch[1], Tensor):
        return batch
    return batch[0], batch[1] if batch[1].is_floating_point() else batch[1].long()


def _shown(numbers: list[int]) -> str:
    return f"{', '.join(map(str, numbers[:4]))}{', ...' if len(numbers) > 4 else ''}"


def _length(label: str, dataset: Any) -> int:
    with OwnCode(f"{label}: its length"):
        return len(dataset)
