"""In which order an epoch visits its samples: any position's sample at once, in memory that does not grow with them.

Numbers below an arbitrary length are permuted as ciphers permute them (Black and Rogaway 2002, "Ciphers with arbitrary
finite domains"). Few are sorted by a hash, which makes every order as likely as any other. Many go through a Feistel
network on a rectangle that just holds them, and what comes out beyond the last number goes through it again.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from lockstep.core import random
from lockstep.core.random import UInt64

Order = Callable[[NDArray[np.int64]], NDArray[np.int64]]  # samples at positions in an epoch, whatever the shape

FEW: Final = 4096  # samples; on a small rectangle a network is no fair shuffle, and 32 KiB are a small array
# With 4 neighbours in the order are visibly closer than chance allows, with 6 from 1,000 samples on not.
_ROUNDS: Final = 8


def shuffle(seed: int, epoch: int, length: int) -> Order:
    """Return the order in which `epoch` visits `length` samples."""
    if length <= FEW:
        return permutation(seed, epoch, length).__getitem__
    keys = [random.key(random.ORDER, seed, epoch, number) for number in range(_ROUNDS)]
    return Network(length, tuple(zip(keys[::2], keys[1::2], strict=True)))


def permutation(seed: int, epoch: int, length: int) -> NDArray[np.int64]:
    """Return numbers below `length`, sorted by their hashes: int64 of shape [length]."""
    keys = random.bits(random.key(random.ORDER, seed, epoch), np.arange(length, dtype=np.uint64))
    return np.argsort(keys)


@final
@dataclass(frozen=True)
class Network:
    """A permutation of the numbers below `length`, with a pair of keys for each two rounds.

    A number is a row and a column of a rectangle. A round moves each row around by a hash of its number, the next one
    each column: both can be undone, so together they permute. The rectangle holds less than a row more than `length`.
    Its rows are of even length: to move one around is then as often an odd permutation as an even one.
    """

    length: int  # below 2**63
    keys: tuple[tuple[int, int], ...]

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number at each position, which are from 0 to `length` - 1: int64 of the same shape."""
        numbers = self._permute(positions.astype(np.uint64))
        while len(outside := np.flatnonzero(numbers >= self.length)):
            numbers.flat[outside] = self._permute(numbers.flat[outside])
        return numbers.astype(np.int64)

    def _permute(self, numbers: UInt64) -> UInt64:
        rows, columns = np.divmod(numbers, np.uint64(self._columns))
        for across, down in self.keys:
            columns = _around(columns, random.below(across, rows, self._columns), self._columns)
            rows = _around(rows, random.below(down, columns, self._rows), self._rows)
        return np.asarray(rows * np.uint64(self._columns) + columns)

    @cached_property
    def _columns(self) -> int:
        return 2 * (math.isqrt(self.length - 1) // 2 + 1)

    @cached_property
    def _rows(self) -> int:
        return -(-self.length // self._columns)


def _around(numbers: UInt64, by: UInt64, end: int) -> UInt64:
    """Add to numbers below `end` others below it, which are not kept, and begin again at 0 where `end` is reached."""
    by += numbers
    return np.asarray(np.minimum(by, by - np.uint64(end)))  # of what is below `end` the difference wraps, to more
