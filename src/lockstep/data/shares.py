"""Chooses the validation samples of a dataset that has no validation part, by a hash, so that the choice is stable."""

import hashlib
import os
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lockstep.core import random

_KEY: Final = random.key(random.SPLIT)


def in_share(name: str, share: float) -> bool:
    """Return whether the sample `name` is in the share.

    Adding or removing samples doesn't move any other sample.
    """
    return _name_hash(name) < share * 2**64


def take_share(names: Sequence[str], share: float) -> list[str]:
    """Return the share of `names` with the lowest hashes, rounded to the nearest number of names.

    If the share is not 0 and there are at least two names, takes at least one name but not all. Names that you add
    later only move as many names as necessary to keep the share.
    """
    count = min(max(round(share * len(names)), 1), len(names) - 1) if share else 0
    return sorted(names, key=_name_hash)[:count]


def rows_in_share(rows: int, share: float) -> NDArray[np.bool_]:
    """Return for each of the rows 0, 1, ... whether it is in the share. Adding rows later doesn't move any row."""
    return random.uniform(_KEY, np.arange(rows), 1)[:, 0] < share


def _name_hash(name: str) -> int:
    """Return the hash of a name, an integer of at least 0 and less than 2**64, by which names are ordered."""
    return int.from_bytes(hashlib.blake2b(os.fsencode(name), digest_size=8).digest(), "little")
