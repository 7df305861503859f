"""Any map-style data set of the user's own as a split: items by number, collated."""

from __future__ import annotations

import random as python_random
from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, TensorDataset, default_collate

from lockstep.common.own_code import OwnCode
from lockstep.core import random
from lockstep.core.batch import Batch, tensors_of
from lockstep.errors import UsageError

Collate = Callable[[list[Any]], Batch]


@final
class Items:
    """The samples of `dataset`, whose items may be anything that `collate` makes a batch of, with samples along dim 0.

    What draws at random in an item follows from the epoch's key and the sample's number, whoever fetches it. Tensors
    in memory, as a TensorDataset has them, are cut without a collate.
    """

    def __init__(self, dataset: Any, collate: Collate | None, label: str = "") -> None:
        self._label = label or f"data set {type(dataset).__name__}"
        _check(self._label, dataset)
        self._dataset = dataset
        self._collate = collate or default_collate
        self._length = _length(self._label, dataset)
        self._tensors = dataset.tensors if type(dataset) is TensorDataset and collate is None else None
        self.in_memory: bool = self._tensors is not None

    def __len__(self) -> int:
        return self._length

    def fetch(self, indices: NDArray[np.int64], draw: int | None) -> Batch:
        """See Split."""
        if self._tensors is not None:
            chosen = torch.from_numpy(indices)
            return [tensor.index_select(0, chosen) for tensor in self._tensors]
        items = [self._item(index, draw) for index in indices.tolist()]
        with OwnCode(f"{self._label}: collate"):
            batch = self._collate(items)
        _check_batch(self._label, batch, len(items))
        return batch

    def _item(self, index: int, draw: int | None) -> Any:
        seed_generators(random.key(random.SAMPLE, draw or 0, index))
        with OwnCode(f"{self._label}: sample {index}"):
            return self._dataset[index]


def seed_generators(key: int) -> None:
    """Seed what the user's code draws from: Python's, NumPy's and torch's generators.

    torch.manual_seed is not used, because it queues a call for CUDA at each use until CUDA starts.
    """
    seed_python_and_numpy(key)
    torch.default_generator.manual_seed(random.torch_seed(key))


def seed_python_and_numpy(key: int) -> None:
    """Seed the global generators that torch does not have."""
    python_random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)  # NumPy's global generator takes 32 bits


def _check(label: str, dataset: Any) -> None:
    kind = type(dataset)
    mapped = callable(getattr(kind, "__getitem__", None)) and callable(getattr(kind, "__len__", None))
    if not mapped or isinstance(dataset, IterableDataset | dict):
        raise UsageError(f"{label}: expected a map-style data set, with a length and items by number")


def _length(label: str, dataset: Any) -> int:
    with OwnCode(f"{label}: its length"):
        length = len(dataset)
    if not length:
        raise UsageError(f"{label}: it has no samples")
    return length


def _check_batch(label: str, batch: Batch, samples: int) -> None:
    tensors: Sequence[torch.Tensor] = tensors_of(batch)
    if not tensors:
        raise UsageError(f"{label}: collate gave a {type(batch).__name__} without a tensor; give tensors")
    wrong = next((each for each in tensors if not each.ndim or len(each) != samples), None)
    if wrong is not None:
        raise UsageError(
            f"{label}: collate gave a tensor of shape {list(wrong.shape)} for {samples} samples; "
            f"let samples run along dim 0 of each tensor"
        )
