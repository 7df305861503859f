"""Which samples are validation's where a dataset has none: a share of them, by a hash, so that it stays theirs."""

from __future__ import annotations

import hashlib
import os
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lockstep.core import random

_KEY: Final = random.key(random.SPLIT)


def in_share(name: str, share: float) -> bool:
    """Say whether the sample of this name is in the share. Others may come and go, it stays where it is."""
    digest = hashlib.blake2b(os.fsencode(name), digest_size=8).digest()
    return int.from_bytes(digest, "little") < share * 2**64


def rows_in_share(rows: int, share: float) -> NDArray[np.bool_]:
    """Say for each of the rows 0, 1, ... whether it is in the share; rows added later move none of them."""
    return random.uniform(_KEY, np.arange(rows), 1)[:, 0] < share
