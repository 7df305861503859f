"""The order in which each epoch visits the samples: shuffled, sequential, or a function of the epoch.

A custom order is a user function that returns the sample indices of an epoch. It can repeat or omit samples, but must
return the same number of indices for each epoch. The result must depend only on the epoch, so that all ranks and all
resumed runs get the same order.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from lockstep.common.user_code import UserCode
from lockstep.core.shuffle import OrderFunction, make_shuffled_order
from lockstep.errors import UsageError

IndexFunction = Callable[[int], Any]  # epoch -> sample indices: a sequence, array or tensor of integers

SHUFFLED: Final = "shuffled"
SEQUENTIAL: Final = "sequential"


@final
@dataclass(frozen=True)
class SampleOrder:
    """The order in which each epoch visits `num_samples` samples, as set by `order`. Errors start with `label`."""

    order: str | IndexFunction
    seed: int
    num_samples: int
    label: str = "order"

    def __post_init__(self) -> None:
        is_valid = self.order in (SHUFFLED, SEQUENTIAL) if isinstance(self.order, str) else callable(self.order)
        if not is_valid:
            raise UsageError(
                f"{self.label}: order is {self.order!r}; pass 'shuffled', 'sequential', or a function of the epoch "
                f"that returns sample indices"
            )

    @property
    def is_function(self) -> bool:
        """Whether the order comes from a user function. If so, ranks must compare their orders."""
        return not isinstance(self.order, str)

    @cached_property
    def samples_per_epoch(self) -> int:
        """The number of samples visited in an epoch."""
        return len(self._get_indices(0)) if self.is_function else self.num_samples

    @cached_property
    def name(self) -> str:
        """The name of the order. For a user function, a digest of the sample indices of epoch 0."""
        return f"a function, {self.compute_digest(0)} in epoch 0" if self.is_function else str(self.order)

    def get_epoch_order(self, epoch: int) -> OrderFunction:
        """Return a function that maps positions in an epoch to sample indices."""
        if self.order == SHUFFLED:
            return make_shuffled_order(self.seed, epoch, self.num_samples)
        if self.order == SEQUENTIAL:
            return _identity
        indices = self._get_indices(epoch)
        if len(indices) != self.samples_per_epoch:
            raise UsageError(
                f"{self.label}: the order has {len(indices)} samples in epoch {epoch}, but {self.samples_per_epoch} in "
                "epoch 0; return the same number for each epoch, for example by repeating or omitting samples"
            )
        return indices.__getitem__

    def compute_digest(self, epoch: int) -> str:
        """Return a digest of the sample indices that a custom order returns for an epoch."""
        return hashlib.sha256(self._get_indices(epoch).tobytes()).hexdigest()[:16]

    def _get_indices(self, epoch: int) -> NDArray[np.int64]:
        return self._cached_indices(epoch)

    @cached_property
    def _cached_indices(self) -> Callable[[int], NDArray[np.int64]]:
        return lru_cache(2)(self._compute_indices)  # the data loader can be one epoch ahead of the training loop

    def _compute_indices(self, epoch: int) -> NDArray[np.int64]:
        result = self._call_order_function(epoch)
        if result.ndim != 1 or not len(result) or result.dtype.kind not in "iu":
            raise UsageError(
                f"{self.label}: the order of epoch {epoch} has dtype {result.dtype} and shape {list(result.shape)}; "
                f"return a list or 1-dim array of integers, one for each sample"
            )
        indices = result.astype(np.int64)
        if indices.min() < 0 or indices.max() >= self.num_samples:
            raise UsageError(
                f"{self.label}: the order of epoch {epoch} has indices from {indices.min()} to {indices.max()}, but "
                f"there are {self.num_samples} samples; return indices from 0 to {self.num_samples - 1}"
            )
        if epoch == 0 and not np.array_equal(result, self._call_order_function(epoch)):
            raise UsageError(
                f"{self.label}: the order function returned different indices when it was called twice for epoch 0, so "
                f"a resumed run would have a different order; compute the order only from the epoch and a seed, such "
                f"as torch.Generator().manual_seed(epoch)"
            )
        return indices

    def _call_order_function(self, epoch: int) -> NDArray[Any]:
        assert not isinstance(self.order, str)
        with UserCode(f"{self.label}: order"):
            return np.asarray(self.order(epoch))


def _identity(positions: NDArray[np.int64]) -> NDArray[np.int64]:
    return positions
