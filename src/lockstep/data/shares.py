"""Selects validation samples by hash, for datasets without a validation split."""

import hashlib
import os
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lockstep.core import random

_SPLIT_KEY: Final = random.key(random.SPLIT)


def is_in_share(name: str, share: float) -> bool:
    """Return whether the sample `name` is among the fraction `share` of samples that is selected by hash.

    The result doesn't change if you add or remove other samples later.
    """
    return _hash_name(name) < share * 2**64


def select_share(names: Sequence[str], share: float) -> list[str]:
    """Select the names with the lowest hashes. Their number is `share * len(names)`, rounded.

    If the share isn't 0 and there are at least two names, at least one name is selected, and at least one name isn't
    selected. If you add names later, the selection changes as little as possible.
    """
    count = min(max(round(share * len(names)), 1), len(names) - 1) if share else 0
    return sorted(names, key=_hash_name)[:count]


def rows_in_share(rows: int, share: float) -> NDArray[np.bool_]:
    """Return a bool mask that selects a random share of `rows` rows. Appending rows doesn't change the earlier mask."""
    return random.uniform(_SPLIT_KEY, np.arange(rows), 1)[:, 0] < share


def _hash_name(name: str) -> int:
    """Return a 64-bit hash of a name, as a non-negative integer."""
    return int.from_bytes(hashlib.blake2b(os.fsencode(name), digest_size=8).digest(), "little")
