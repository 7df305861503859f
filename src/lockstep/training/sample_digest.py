"""A digest of the first and last sample of a dataset, to check that ranks and resumed runs use the same dataset."""

import hashlib
from collections.abc import Callable
from itertools import zip_longest
from typing import Any

import numpy as np

from lockstep.core.batch import Batch, get_tensors
from lockstep.data.base import Split
from lockstep.errors import TrainingError
from lockstep.training.checkpoint import tensorfile


def _select_all(batch: Batch) -> Batch:
    return batch


def digest_end_samples(split: Split, select: Callable[[Batch], Any] = _select_all) -> str:
    """Return a digest of the first and last sample of a split, or "unreadable" if a sample can't be read.

    `select` returns the part of a batch that the digest covers.
    """
    try:
        # Fetch each sample as a separate batch, because samples of different lengths can't be stacked.
        batches = [split.fetch(np.array([number]), None) for number in sorted({0, len(split) - 1})]
    except TrainingError:  # the error is reported when training reads the sample
        return "unreadable"
    samples = [get_tensors(select(batch)) for batch in batches]
    # Interleave the tensors of both samples, so that the digest equals those in existing checkpoints.
    tensors = [tensor for pair in zip_longest(*samples) for tensor in pair if tensor is not None]
    return hashlib.sha256(b"".join(tensorfile.to_bytes(tensor) for tensor in tensors)).hexdigest()[:16]
