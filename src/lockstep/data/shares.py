"""Selects validation samples from a dataset without a validation split. A hash makes the selection stable."""

import hashlib
import os
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lockstep.core import random

_SPLIT_KEY: Final = random.key(random.SPLIT)


def in_share(name: str, share: float) -> bool:
    """Return whether the hash of the sample `name` is within the share, which is a fraction of at most 1.

    The result doesn't depend on the other samples, so you can add or remove samples later.
    """
    return _name_hash(name) < share * 2**64


def select_share(names: Sequence[str], share: float) -> list[str]:
    """Select the names with the lowest hashes. Their number is `share * len(names)`, rounded.

    If the share isn't 0 and there are at least two names, at least one name is selected, and at least one isn't. If you
    add names later, the selection only changes as much as necessary.
    """
    count = min(max(round(share * len(names)), 1), len(names) - 1) if share else 0
    return sorted(names, key=_name_hash)[:count]


def rows_in_share(rows: int, share: float) -> NDArray[np.bool_]:
    """Return a bool array that selects a random share of `rows` rows. Adding rows later doesn't change earlier rows."""
    return random.uniform(_SPLIT_KEY, np.arange(rows), 1)[:, 0] < share


def _name_hash(name: str) -> int:
    """Return a 64-bit hash of a name, as a non-negative integer."""
    return int.from_bytes(hashlib.blake2b(os.fsencode(name), digest_size=8).digest(), "little")
