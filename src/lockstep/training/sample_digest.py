"""A digest of a dataset's first and last sample, by which ranks and starts of a run see that they have the same one."""

import hashlib
from collections.abc import Callable
from itertools import zip_longest
from typing import Any

import numpy as np

from lockstep.core.batch import Batch, tensors_of
from lockstep.data.base import Split
from lockstep.errors import TrainingError
from lockstep.training.checkpoint import tensorfile


def _whole(batch: Batch) -> Batch:
    return batch


def digest_ends(split: Split, select: Callable[[Batch], Any] = _whole) -> str:
    """Return a digest of the first and the last sample of a split, or of the part of a batch that `select` returns."""
    try:
        # A batch of its own for each: a collate of equally long samples cannot stack two of other lengths.
        batches = [split.fetch(np.array([number]), None) for number in sorted({0, len(split) - 1})]
    except TrainingError:  # a file that cannot be read: training says so, in its step, if it ever comes to it
        return "unreadable"
    samples = [tensors_of(select(batch)) for batch in batches]
    # Tensor by tensor, as both samples stacked would be: digests in checkpoints stay comparable.
    tensors = [tensor for pair in zip_longest(*samples) for tensor in pair if tensor is not None]
    return hashlib.sha256(b"".join(tensorfile.raw(tensor) for tensor in tensors)).hexdigest()[:16]
