"""Shuffled sample orders with random access, in constant memory.

The methods are those of Black and Rogaway 2002, "Ciphers with arbitrary finite domains". The indices of a small dataset
are sorted by a hash, so all orders are equally likely. For a large dataset, each index goes through a Feistel network
on the smallest rectangle that holds all indices. If the result is out of range, it goes through the network again.
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

# Positions in an epoch -> sample indices of the same shape.
OrderFunction = Callable[[NDArray[np.int64]], NDArray[np.int64]]

# Larger datasets are shuffled with a Feistel network, which shuffles a small number of indices poorly. A permutation
# array of this size only takes 32 KiB.
MAX_SORTED_SAMPLES: Final = 4096
# With 4 rounds, consecutive indices are measurably closer than by chance. With 6 rounds, this is only measurable below
# 1,000 samples.
_ROUNDS: Final = 8


def make_shuffled_order(seed: int, epoch: int, length: int) -> OrderFunction:
    """Return the shuffled order of `length` samples in `epoch`."""
    if length <= MAX_SORTED_SAMPLES:
        return sort_by_hash(seed, epoch, length).__getitem__
    keys = [random.make_key(random.ORDER, seed, epoch, number) for number in range(_ROUNDS)]
    return FeistelNetwork(length, tuple(zip(keys[::2], keys[1::2], strict=True)))


def sort_by_hash(seed: int, epoch: int, length: int) -> NDArray[np.int64]:
    """Return the integers in [0, length) sorted by their hashes: int64 of shape [length]."""
    keys = random.bits(random.make_key(random.ORDER, seed, epoch), np.arange(length, dtype=np.uint64))
    return np.argsort(keys)


@final
@dataclass(frozen=True)
class FeistelNetwork:
    """A permutation of the integers in [0, length), with a pair of keys for every two rounds.

    Each integer is a cell of a rectangle. One round rotates each row by a hash of the row number, and the next round
    rotates each column by a hash of the column number. Rotations are invertible, so the network is a permutation. The
    rectangle has less than one row of unused cells. Its rows have an even length, so that the rotation of a row is
    equally often an odd and an even permutation.
    """

    length: int  # below 2**63
    keys: tuple[tuple[int, int], ...]

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sample indices at these positions: int64 of the same shape, from 0 to `length` - 1."""
        numbers = self._permute(positions.astype(np.uint64))
        while len(outside := np.flatnonzero(numbers >= self.length)):
            numbers.flat[outside] = self._permute(numbers.flat[outside])
        return numbers.astype(np.int64)

    def _permute(self, numbers: UInt64) -> UInt64:
        rows, columns = np.divmod(numbers, np.uint64(self._columns))
        for row_key, column_key in self.keys:
            columns = _rotate(columns, random.draw_integers(row_key, rows, self._columns), self._columns)
            rows = _rotate(rows, random.draw_integers(column_key, columns, self._rows), self._rows)
        return np.asarray(rows * np.uint64(self._columns) + columns)

    @cached_property
    def _columns(self) -> int:
        return 2 * (math.isqrt(self.length - 1) // 2 + 1)

    @cached_property
    def _rows(self) -> int:
        return -(-self.length // self._columns)


def _rotate(numbers: UInt64, offsets: UInt64, modulus: int) -> UInt64:
    """Return `(numbers + offsets) % modulus`. Both inputs must be less than `modulus`. Overwrites `offsets`."""
    offsets += numbers
    # If a sum is below `modulus`, the unsigned difference wraps around and is larger than the sum.
    return np.asarray(np.minimum(offsets, offsets - np.uint64(modulus)))
