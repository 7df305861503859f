"""Sample orders for `run.steps(..., order=)` and `BatchSampler(..., order=)`: weighted sampling, and batches by length.

An order is a function that takes the epoch and returns sample indices. These orders draw random numbers by hashing
(seed, epoch, sample). Therefore all ranks have the same order, and a run can resume in the middle of an epoch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from lockstep.core import random
from lockstep.core.shuffle import sort_by_hash
from lockstep.errors import UsageError


@final
@dataclass(frozen=True, eq=False)
class Weighted:
    """Samples the dataset in proportion to `weights`: `order=lockstep.orders.Weighted(weights, seed=0)`.

    Use it instead of WeightedRandomSampler. `weights` are non-negative numbers, one for each sample of the dataset.
    `samples` is the number of samples per epoch, and defaults to the size of the dataset.

    With `replacement`, each sample is drawn independently, so a sample can appear several times. Without `replacement`,
    no sample appears twice, and samples with large weights tend to come first.

    Raises UsageError if a weight is negative or not finite, if all weights are 0, or if `samples` is less than 1.
    Without `replacement`, raises UsageError if fewer than `samples` weights are above 0.
    """

    weights: Sequence[float] | NDArray[np.float64]
    seed: int = 0
    samples: int | None = None
    replacement: bool = True

    def __post_init__(self) -> None:
        weights = np.asarray(self.weights, np.float64)
        if weights.ndim != 1 or not np.isfinite(weights).all() or (weights < 0).any() or not weights.any():
            raise UsageError(
                "orders.Weighted: weights must be a 1-D sequence of finite, non-negative numbers that are not all 0; "
                "pass one weight for each sample"
            )
        positive = int(np.count_nonzero(weights))
        count = len(weights) if self.samples is None else self.samples
        if count < 1:
            raise UsageError(f"orders.Weighted: samples must be at least 1, got {count}; set samples to 1 or more")
        if not self.replacement and count > positive:
            raise UsageError(
                f"orders.Weighted: cannot draw {count} samples without replacement, because only {positive} of "
                f"{len(weights)} samples have a weight above 0; set samples from 1 to {positive}, or replacement=True"
            )

    def __call__(self, epoch: int) -> NDArray[np.int64]:
        """Return the sample indices of an epoch, int64 of shape [samples]."""
        weights = np.asarray(self.weights, np.float64)
        count = len(weights) if self.samples is None else self.samples
        key = random.make_key(random.SELECTION, self.seed, epoch)
        if self.replacement:
            ends = np.cumsum(weights)
            drawn = random.draw_uniform(key, np.arange(count), 1)[:, 0] * ends[-1]
            # Rounding can make `drawn` equal to the last end. Then select the last sample with a nonzero weight.
            last = int(np.flatnonzero(weights)[-1])
            return np.asarray(np.minimum(np.searchsorted(ends, drawn, side="right"), last), np.int64)
        # Efraimidis and Spirakis 2006, "Weighted random sampling with a reservoir": select the samples with the
        # smallest arrival times, which are exponentially distributed with the weights as rates.
        uniform = 1.0 - random.draw_uniform(key, np.arange(len(weights)), 1)[:, 0]
        times = np.full(len(weights), np.inf)
        np.divide(-np.log(uniform), weights, out=times, where=weights > 0)
        return np.argsort(times, kind="stable")[:count].astype(np.int64)


@final
@dataclass(frozen=True, eq=False)
class ByLength:
    """Puts samples of similar length into the same batch: `order=lockstep.orders.ByLength(lengths, batch=32, seed=0)`.

    This reduces padding. In each epoch, the samples are shuffled, and then sorted by length within pools of `pool`
    batches. Finally, the batches are shuffled. If the last batch is smaller, it stays at the end.

    `lengths` has the length of each sample. `batch` must be the batch size of `run.steps`. Samples within a batch are
    sorted by length, too, so the lengths within a micro-batch differ even less.
    """

    lengths: Sequence[int] | NDArray[np.int64]
    batch: int
    seed: int = 0
    pool: int = 100

    def __post_init__(self) -> None:
        if self.batch < 1 or self.pool < 1 or np.asarray(self.lengths).ndim != 1 or not len(self.lengths):
            raise UsageError(
                f"orders.ByLength: batch and pool must be at least 1, and lengths must be a non-empty 1-D sequence, "
                f"got batch={self.batch}, pool={self.pool} and lengths of shape {list(np.shape(self.lengths))}; pass "
                f"one length for each sample"
            )

    def __call__(self, epoch: int) -> NDArray[np.int64]:
        """Return the sample indices of an epoch, int64 of shape [dataset size]."""
        lengths: NDArray[Any] = np.asarray(self.lengths)
        count = len(lengths)
        shuffled = sort_by_hash(self.seed, epoch, count)
        size = self.batch * self.pool
        pools = [shuffled[first : first + size] for first in range(0, count, size)]
        ordered = np.concatenate([pool[np.argsort(lengths[pool], kind="stable")] for pool in pools])
        full_batches = count // self.batch
        batches = ordered[: full_batches * self.batch].reshape(full_batches, self.batch)
        keys = random.bits(
            random.make_key(random.SELECTION, self.seed, epoch), np.arange(full_batches, dtype=np.uint64)
        )
        return np.concatenate([batches[np.argsort(keys)].ravel(), ordered[full_batches * self.batch :]]).astype(
            np.int64
        )
