"""The names of splits, and a hash function that selects validation samples for datasets without a validation split."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lockstep.core import random
from lockstep.errors import UsageError

# Names of files or folders that usually contain a split.
TRAIN_NAMES: Final = ("train", "training")
HELD_OUT_NAMES: Final = ("test", "testing", "val", "valid", "validation", "dev")
_DEFAULT_FRACTION: Final = 0.1
_SPLIT_KEY: Final = random.make_key(random.SPLIT)


def get_validation_fraction(
    dataset_name: str, fraction: float | None, existing_split: str | Path | None = None
) -> float:
    """Return the fraction of a dataset for validation: the value of its option `validation`, or the default fraction.

    `existing_split` is the path or a description of the validation split of the data, or None if it has none. With such
    a split, the result is 0. Raises UsageError if the option is set nevertheless.
    """
    if existing_split is None:
        return _DEFAULT_FRACTION if fraction is None else fraction
    if fraction is not None:
        raise UsageError(
            f"dataset {dataset_name}: recipe.data.options.validation: not supported with {existing_split}; remove it"
        )
    return 0.0


def is_held_out(name: str, fraction: float) -> bool:
    """Return whether a sample is selected for validation. Each name is selected with probability `fraction`.

    The result depends only on the name and the fraction, so it doesn't change if other samples are added or removed.
    """
    return _hash_name(name) < fraction * 2**64


def select_held_out(names: Sequence[str], fraction: float) -> list[str]:
    """Return the `round(fraction * len(names))` names with the lowest hashes.

    Unless the fraction is 0 or there is only one name, at least one name is selected and at least one isn't. If names
    are added later, the selection changes as little as possible.
    """
    count = min(max(round(fraction * len(names)), 1), len(names) - 1) if fraction else 0
    return sorted(names, key=_hash_name)[:count]


def make_held_out_mask(num_rows: int, fraction: float) -> NDArray[np.bool_]:
    """Return a bool mask of shape [num_rows], in which each row is selected with probability `fraction`.

    The selection is deterministic. Appending rows doesn't change the mask of the existing rows.
    """
    return random.draw_uniform(_SPLIT_KEY, np.arange(num_rows), 1)[:, 0] < fraction


def _hash_name(name: str) -> int:
    """Return a 64-bit hash of a name, as a non-negative integer."""
    return int.from_bytes(hashlib.blake2b(os.fsencode(name), digest_size=8).digest(), "little")
