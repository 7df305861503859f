"""The canonical sum: a binary tree over micro-batches that doesn't depend on their distribution over processes.

Floating-point addition isn't associative, so the sum of M gradients depends on the order of the additions. In Lockstep,
this order depends only on the micro-batch numbers. Leaf m is micro-batch m, and a node is an aligned block
[k * 2^j, (k + 1) * 2^j) of leaves, truncated at M. If the right half of a block is beyond M, the block equals its left
half.

A process that holds a contiguous range of leaves first adds the leaves that form complete blocks. The resulting sums,
at most two per level, are the *pieces* that it sends to other processes. A block is only ever added to its sibling.
Therefore the order of the additions and the bits of the sum don't depend on the distribution of the leaves.
"""

from collections.abc import Callable, Mapping
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class LeafBlock(NamedTuple):
    """An aligned block of leaves: [first, first + size). `size` is a power of two that divides `first`."""

    first: int
    size: int

    @property
    def is_right(self) -> bool:
        """Whether the block is the right child of its parent."""
        return bool((self.first // self.size) % 2)

    @property
    def sibling(self) -> "LeafBlock":
        """The other child of this block's parent."""
        return LeafBlock(self.first ^ self.size, self.size)


def split_into_blocks(leaves: range) -> list[LeafBlock]:
    """Split a contiguous range of leaves into the smallest number of aligned blocks, from left to right."""
    aligned = []
    first = leaves.start
    while first < leaves.stop:
        size = first & -first or 1 << leaves.stop.bit_length()
        while first + size > leaves.stop:
            size //= 2
        aligned.append(LeafBlock(first, size))
        first += size
    return aligned


class BinaryCounter(Generic[T]):
    """Adds the leaves of the tree one by one, and keeps only the partial sums that can't be merged yet.

    This is a binary counter. If n leaves are added from left to right, the counter holds at most log2(n) + 1 partial
    sums. `add(left, right)` may modify `left` in place.
    """

    def __init__(self, add: Callable[[T, T], T]) -> None:
        self._add = add
        self._partial_sums: dict[LeafBlock, T] = {}

    def push(self, leaf: int, value: T) -> None:
        """Add a leaf, and merge the sibling blocks that are now complete."""
        self.add_block(LeafBlock(leaf, 1), value)

    def add_block(self, block: LeafBlock, value: T) -> None:
        """Add a block of leaves, and merge the sibling blocks that are now complete."""
        while (sibling := block.sibling) in self._partial_sums:
            sibling_value = self._partial_sums.pop(sibling)
            value = self._add(sibling_value, value) if block.is_right else self._add(value, sibling_value)
            block = LeafBlock(min(block.first, sibling.first), 2 * block.size)
        self._partial_sums[block] = value

    def pop_pieces(self) -> dict[LeafBlock, T]:
        """Return the remaining blocks with their partial sums, from left to right, and clear the counter."""
        pieces_in_order = {block: self._partial_sums[block] for block in sorted(self._partial_sums)}
        self._partial_sums.clear()
        return pieces_in_order


def sum_pieces(pieces: Mapping[LeafBlock, T], num_leaves: int, add: Callable[[T, T], T]) -> T:
    """Add all pieces in the order of the tree, and return the sum. `num_leaves` is the number of leaves.

    The pieces must cover each leaf exactly once. Raises KeyError if a leaf is missing. `add(left, right)` may modify
    `left` in place.
    """

    return _sum_block(LeafBlock(0, 1 << (num_leaves - 1).bit_length()), pieces, num_leaves, add)


# Not a nested function: if it were, a reference cycle would keep the pieces alive until garbage collection.
def _sum_block(block: LeafBlock, pieces: Mapping[LeafBlock, T], num_leaves: int, add: Callable[[T, T], T]) -> T:
    if block in pieces:
        return pieces[block]
    if block.size == 1:
        raise KeyError(f"no piece covers leaf {block.first}")
    half = block.size // 2
    left = _sum_block(LeafBlock(block.first, half), pieces, num_leaves, add)
    if block.first + half >= num_leaves:
        return left
    return add(left, _sum_block(LeafBlock(block.first + half, half), pieces, num_leaves, add))
