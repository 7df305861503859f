"""Random numbers that depend only on what they are for, never on the process that draws them.

Each number is a hash of (key, index, draw number), so a sample gets the same numbers in any process, in any data loader
worker and after any resume. The hash is the finalizer of SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable
pseudorandom number generators", figure 16), applied twice to a Weyl sequence.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

UInt64 = NDArray[np.uint64]

# The number of the random stream for each purpose.
ORDER: Final = 1
AUGMENT: Final = 2
FORWARD: Final = 3
MIX: Final = 4
INITIAL: Final = 5
SYNTHETIC: Final = 6
SAMPLE: Final = 7
DIGEST: Final = 8
SPLIT: Final = 9
LOW_RANK: Final = 10
OWN_LOOP: Final = 11
EVALUATION: Final = 12
SELECTION: Final = 13

_WEYL: Final = 0x9E3779B97F4A7C15
_MASK: Final = 0xFFFFFFFFFFFFFFFF


def make_key(*words: int) -> int:
    """Hash integers (such as stream, seed, epoch and step) to a 64-bit key. Their order matters."""
    return extend_key(0, *words)


def extend_key(key: int, *words: int) -> int:
    """Hash a key and more integers to a new key. `extend_key(make_key(a), b)` equals `make_key(a, b)`."""
    for word in words:
        key = _mix((key + _WEYL + word) & _MASK)
    return key


def bits(key: int, counters: UInt64) -> UInt64:
    """Return 64 random bits for each counter: uint64 of the same shape."""
    start = np.uint64(key)
    with np.errstate(over="ignore"):
        return _mix_array(_mix_array(counters * np.uint64(_WEYL) + start) + start)


def draw_uniform(key: int, indices: NDArray[np.int64], num_draws: int) -> NDArray[np.float64]:
    """Return `num_draws` uniform numbers in [0, 1) for each index: float64 of shape [len(indices), num_draws]."""
    counters = indices.astype(np.uint64)[:, None] * np.uint64(num_draws) + np.arange(num_draws, dtype=np.uint64)
    top = bits(key, np.asarray(counters, np.uint64)) >> np.uint64(11)
    return np.asarray(top.astype(np.float64) * 2.0**-53)


def draw_integers(key: int, counters: UInt64, bound: int) -> UInt64:
    """Return a random integer in [0, bound) for each counter: uint64 of the same shape. `bound` is at most 2**32.

    The probabilities of any two integers differ by at most `bound` / 2**32. The hash is only applied once, not twice as
    in `bits`. This is sufficient if several draws are chained.
    """
    words = _mix_array(counters * np.uint64(_WEYL) + np.uint64(key))
    words >>= np.uint64(32)
    words *= np.uint64(bound)
    words >>= np.uint64(32)
    return words


def make_torch_seed(key: int) -> int:
    """Convert a key to a 63-bit seed, which torch.Generator.manual_seed accepts on every device."""
    return key >> 1


def _mix(word: int) -> int:
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)


def _mix_array(words: UInt64) -> UInt64:
    """Apply `_mix` to each word in place, and return the array. A copy would take twice as long."""
    words ^= words >> np.uint64(30)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words
