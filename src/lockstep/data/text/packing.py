"""Packs sequences of different lengths into bins. The sequences in a bin are concatenated later."""

from bisect import bisect_left, insort
from collections.abc import Sequence


def pack_sequences(lengths: Sequence[int], bin_size: int) -> list[list[int]]:
    """Return the indices of the sequences in each bin, by best-fit decreasing.

    In order of decreasing length, each sequence is placed in the fullest bin with enough space (Johnson 1973). Ties
    are broken by index, so the bins depend only on the lengths. `bin_size` must be at least the longest length.
    """
    bins: list[list[int]] = []
    spaces: list[tuple[int, int]] = []  # the free space and the index of each bin that isn't full, sorted
    for index in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        position = bisect_left(spaces, (lengths[index], -1))
        if position == len(spaces):
            number, space = len(bins), bin_size
            bins.append([])
        else:
            space, number = spaces.pop(position)
        bins[number].append(index)
        if space > lengths[index]:
            insort(spaces, (space - lengths[index], number))
    return sorted(sorted(indices) for indices in bins)
