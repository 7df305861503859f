"""Wraps user-defined map-style datasets and splits, and validates the samples and batches that they return."""

import _random
import random as python_random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from lockstep.common.user_code import UserCode
from lockstep.core import random
from lockstep.core.batch import Batch, get_tensors, map_tensors
from lockstep.data.base import Split
from lockstep.data.collate import check_batch, stack_samples
from lockstep.data.streams.sharded import ShardedDataset
from lockstep.errors import UsageError
from lockstep.tasks.dataset_properties import check_pair

Collate = Callable[[list[Any]], Batch]

_PYTHON_GENERATOR: Final[Any] = python_random.seed.__self__  # type: ignore[attr-defined]  # the global generator


@final
class MapStyleSplit:
    """Wraps a map-style dataset for a custom training loop.

    Samples can be any objects that `collate` converts to a batch with samples along dim 0. Before each sample is
    fetched, the global RNGs are seeded from the key of the epoch and the sample index, so random augmentations don't
    depend on the rank that fetches the sample. If `collate` is None, the tensors of a TensorDataset are indexed
    directly.
    """

    def __init__(self, dataset: Any, collate: Collate | None, label: str = "") -> None:
        # The digest of the shards and samples if the dataset is a stream, or None.
        self.stream_digest = dataset.digest if isinstance(dataset, ShardedDataset) else None
        self._label = label or (
            dataset.label if isinstance(dataset, ShardedDataset) else f"dataset {type(dataset).__name__}"
        )
        if not is_map_style(dataset):
            raise UsageError(
                f"{self._label}: expected a map-style dataset with a length and integer indexing; "
                f"{_format_dataset_advice(dataset)}"
            )
        self._dataset = dataset
        self._collate = collate or default_collate
        self._length = _get_length(self._label, dataset)
        if not self._length:
            raise UsageError(f"{self._label}: has no samples; pass a dataset with at least one sample")
        self._tensors = dataset.tensors if type(dataset) is TensorDataset and collate is None else None
        self.in_memory: bool = self._tensors is not None

    def __len__(self) -> int:
        return self._length

    def fetch(self, indices: NDArray[np.int64], random_key: int | None) -> Batch:
        """See Split."""
        if self._tensors is not None:
            positions = torch.from_numpy(indices)
            return [tensor.index_select(0, positions) for tensor in self._tensors]
        items = [
            _fetch_item(f"{self._label}: sample {index}", self._dataset, index, random_key)
            for index in indices.tolist()
        ]
        with UserCode(f"{self._label}: collate"):
            try:
                batch = self._collate(items)
            except (RuntimeError, TypeError) as error:
                if self._collate is not default_collate:
                    raise
                raise UsageError(
                    f"{self._label}: torch's default_collate cannot stack the samples {_format_indices(indices)}: "
                    f"{type(error).__name__}: {error}; pass collate=, a function that makes a batch from a list "
                    f"of samples, for example by padding them"
                ) from error
        _check_batch(self._label, batch, len(items))
        return batch


@final
class ImportedSplit:
    """Wraps a user-defined map-style dataset for a recipe.

    `collate` converts a list of samples to a batch. If it is None, the samples are stacked. Raises UsageError for
    invalid samples.
    """

    in_memory: bool = False

    def __init__(self, label: str, dataset: Any, class_names: Sequence[str], collate: Collate | None) -> None:
        self._label = label
        self.dataset = dataset
        self._class_names = class_names
        self._collate = collate
        # Read the length only once, because the steps of the run are planned from it.
        self._length = _get_length(label, dataset)

    def __len__(self) -> int:
        return self._length

    def fetch(self, indices: NDArray[np.int64], random_key: int | None) -> Batch:
        """See Split."""
        if not len(indices):  # fetch a sample anyway, to return an empty batch with the same structure
            return map_tensors(lambda tensor: tensor[:0], self.fetch(np.array([0]), random_key))
        numbers = indices.tolist()
        samples = [
            _fetch_item(f"{self._label} sample {number}", self.dataset, number, random_key) for number in numbers
        ]
        batch = _to_pair(
            stack_samples(self._label, samples, numbers)
            if self._collate is None
            else self._call_collate(samples, numbers, random_key)
        )
        check_pair(self._label, batch, numbers, self._class_names)
        return batch

    def _call_collate(self, samples: list[Any], sample_indices: list[int], random_key: int | None) -> Batch:
        assert self._collate is not None
        # A collate function may draw random numbers, for example for masked language modeling.
        seed_rngs(random.make_key(random.SAMPLE, random_key or 0, sample_indices[0], 1))
        label = f"{self._label}: collate of samples {_format_indices(sample_indices)}"
        with UserCode(label):
            return check_batch(label, self._collate(samples), len(samples))


@final
class CheckedSplit:
    """Wraps a user-defined split, and validates each batch that it returns."""

    def __init__(self, label: str, split: Split) -> None:
        self.in_memory = bool(split.in_memory)
        self._label = label
        self.split = split
        self._length = _get_length(label, split)

    def __len__(self) -> int:
        return self._length

    def fetch(self, indices: NDArray[np.int64], random_key: int | None) -> Batch:
        """See Split."""
        with UserCode(f"{self._label}: fetch"):
            return _to_pair(check_batch(f"{self._label}: fetch", self.split.fetch(indices, random_key), len(indices)))


def seed_rngs(key: int) -> None:
    """Seed the global RNGs of Python, NumPy and torch, which user code may use.

    This function doesn't call torch.manual_seed, because each call queues a callback until CUDA is initialized.
    """
    seed_python_and_numpy(key)
    torch.default_generator.manual_seed(random.make_torch_seed(key))


def seed_python_and_numpy(key: int) -> None:
    """Seed the global RNGs of Python and NumPy."""
    # Equivalent to random.seed(key), but twice as fast, because random.seed first checks the type of its argument in
    # Python code. A custom loop seeds three times per step.
    _random.Random.seed(_PYTHON_GENERATOR, key)
    _PYTHON_GENERATOR.gauss_next = None
    np.random.seed(key & 0xFFFFFFFF)  # NumPy's global generator only accepts a 32-bit seed


@contextmanager
def preserve_rng_states() -> Iterator[None]:
    """Restore the global RNG states of Python, NumPy and torch when the `with` block exits."""
    python, numpy = python_random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([]):
            yield
    finally:
        python_random.setstate(python)
        np.random.set_state(numpy)


def is_map_style(dataset: Any) -> bool:
    """Return whether a dataset has a length and integer indexing."""
    indexed = all(callable(getattr(type(dataset), name, None)) for name in ("__getitem__", "__len__"))
    return indexed and not isinstance(dataset, IterableDataset | dict)


def _format_dataset_advice(dataset: Any) -> str:
    if isinstance(dataset, DataLoader):
        return "pass loader.dataset"
    if isinstance(dataset, IterableDataset):
        return "pass a list, or a stream whose shards are known: a datasets.IterableDataset or a webdataset.WebDataset"
    return "pass a map-style dataset, such as a list of samples"


def _get_length(label: str, dataset: Any) -> int:
    with UserCode(f"{label}: length"):
        return len(dataset)


def _fetch_item(label: str, dataset: Any, index: int, random_key: int | None) -> Any:
    seed_rngs(random.make_key(random.SAMPLE, random_key or 0, index))
    with UserCode(label):
        return dataset[index]


def _check_batch(label: str, batch: Batch, num_samples: int) -> None:
    tensors: Sequence[torch.Tensor] = get_tensors(batch)
    if not tensors:
        raise UsageError(f"{label}: collate returned a {type(batch).__name__} without tensors; return tensors")
    mismatch = next((tensor for tensor in tensors if not tensor.ndim or len(tensor) != num_samples), None)
    if mismatch is not None:
        is_second_dim = mismatch.ndim > 1 and mismatch.shape[1] == num_samples
        raise UsageError(
            f"{label}: collate returned a tensor of shape {list(mismatch.shape)} for {num_samples} samples; put "
            "samples along dim 0 of each tensor"
            + (
                ", and use x = x.transpose(0, 1) in the loop"
                if is_second_dim
                else "; if samples have different sizes, pad and stack them, and remove the padding in the loop"
            )
        )


def _format_indices(indices: Sequence[Any] | NDArray[np.int64]) -> str:
    """Format up to four sample indices, such as `3, 5, 7, 9, ...`."""
    return ", ".join(map(str, indices[:4])) + (", ..." if len(indices) > 4 else "")


def _to_pair(batch: Batch) -> Batch:
    """Convert a pair to a tuple, and its integer targets to int64. Any other batch is returned unchanged."""
    if not isinstance(batch, tuple | list) or len(batch) != 2 or not isinstance(batch[1], Tensor):
        return batch
    return batch[0], batch[1] if batch[1].is_floating_point() else batch[1].long()
