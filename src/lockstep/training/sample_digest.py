"""A digest of the first and last sample of a dataset, used to check that ranks and restarts read the same dataset."""

import hashlib
from collections.abc import Callable
from itertools import zip_longest
from typing import Any

import numpy as np

from lockstep.core.batch import Batch, tensors_of
from lockstep.data.base import Split
from lockstep.errors import TrainingError
from lockstep.training.checkpoint import tensorfile


def _full_batch(batch: Batch) -> Batch:
    return batch


def digest_ends(split: Split, select: Callable[[Batch], Any] = _full_batch) -> str:
    """Return a digest of the first and last sample of a split. `select` returns the part of a batch to include."""
    try:
        # Fetch each sample as a separate batch, because samples of different lengths can't be stacked.
        batches = [split.fetch(np.array([number]), None) for number in sorted({0, len(split) - 1})]
    except TrainingError:  # training reports an unreadable file when it reads the sample
        return "unreadable"
    samples = [tensors_of(select(batch)) for batch in batches]
    # Order the tensors as if both samples were stacked, so that digests in existing checkpoints stay comparable.
    tensors = [tensor for pair in zip_longest(*samples) for tensor in pair if tensor is not None]
    return hashlib.sha256(b"".join(tensorfile.raw(tensor) for tensor in tensors)).hexdigest()[:16]
