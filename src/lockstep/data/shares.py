"""Which samples are validation's where a dataset has none: a share of them, by a hash, so that it stays theirs."""

import hashlib
import os
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lockstep.core import random

_KEY: Final = random.key(random.SPLIT)


def in_share(name: str, share: float) -> bool:
    """Say whether the sample of this name is in the share. Others may come and go, it stays where it is."""
    return _place(name) < share * 2**64


def take_share(names: Sequence[str], share: float) -> list[str]:
    """Return the nearest whole number of `names` to a share of them, those whose hashes are the lowest.

    At least one and not all are taken, where the share is not 0 and there are two. Names that are added later move as
    few others as keeps the share.
    """
    count = min(max(round(share * len(names)), 1), len(names) - 1) if share else 0
    return sorted(names, key=_place)[:count]


def rows_in_share(rows: int, share: float) -> NDArray[np.bool_]:
    """Say for each of the rows 0, 1, ... whether it is in the share; rows added later move none of them."""
    return random.uniform(_KEY, np.arange(rows), 1)[:, 0] < share


def _place(name: str) -> int:
    """Return where a name stands among all: a whole number from 0 to 2**64, by its hash."""
    return int.from_bytes(hashlib.blake2b(os.fsencode(name), digest_size=8).digest(), "little")
