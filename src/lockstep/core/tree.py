"""The canonical sum: one binary tree over micro-batch numbers, wherever they are held.

Floating-point addition is not associative, so the sum of M gradients depends on where the brackets stand.
Here they stand by micro-batch number alone: leaf m is micro-batch m, and a node is an aligned block
[k * 2^j, (k + 1) * 2^j) of leaves, cut off at M. A block whose right half is beyond M is its left half.

A process that holds any contiguous range of leaves can add those that fill whole blocks; the few blocks that
remain (at most two for each level) are the *pieces* it must communicate to the others. Sibling blocks are
only ever added to each other, so every distribution of the leaves gives the same brackets, hence the same bits.
"""

from collections.abc import Callable, Mapping
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class LeafBlock(NamedTuple):
    """An aligned block of leaves: [first, first + size), with size a power of two that divides first."""

    first: int
    size: int

    @property
    def is_right(self) -> bool:
        """Whether the block is the right child of its parent."""
        return bool((self.first // self.size) % 2)

    @property
    def sibling(self) -> "LeafBlock":
        """The other child of its parent."""
        return LeafBlock(self.first ^ self.size, self.size)


def blocks(leaves: range) -> list[LeafBlock]:
    """Split a contiguous range of leaves into the fewest aligned blocks, from left to right."""
    found = []
    first = leaves.start
    while first < leaves.stop:
        size = first & -first or 1 << leaves.stop.bit_length()
        while first + size > leaves.stop:
            size //= 2
        found.append(LeafBlock(first, size))
        first += size
    return found


class Counter(Generic[T]):
    """Adds leaves as they arrive, keeping only the blocks that cannot yet be merged.

    It is a binary counter: of n leaves that arrive from left to right at most log2(n) + 1 partial sums are alive.
    `add(left, right)` may reuse the memory of `left`.
    """

    def __init__(self, add: Callable[[T, T], T]) -> None:
        self._add = add
        self._held: dict[LeafBlock, T] = {}

    def push(self, leaf: int, value: T) -> None:
        """Add a leaf, merging every pair of sibling blocks that it completes."""
        self.take(LeafBlock(leaf, 1), value)

    def take(self, block: LeafBlock, value: T) -> None:
        """Add a block of leaves, likewise."""
        while (sibling := block.sibling) in self._held:
            other = self._held.pop(sibling)
            value = self._add(other, value) if block.is_right else self._add(value, other)
            block = LeafBlock(min(block.first, sibling.first), 2 * block.size)
        self._held[block] = value

    def pieces(self) -> dict[LeafBlock, T]:
        """Return the blocks held, from left to right, and forget them."""
        held = {block: self._held[block] for block in sorted(self._held)}
        self._held.clear()
        return held


def total(pieces: Mapping[LeafBlock, T], leaves: int, add: Callable[[T, T], T]) -> T:
    """Add the pieces of all `leaves` leaves in the order of the tree.

    The pieces must cover the leaves exactly once, as the `blocks` of any cut of them do; a gap raises KeyError.
    `add(left, right)` may reuse the memory of `left`.
    """

    return _value(LeafBlock(0, 1 << (leaves - 1).bit_length()), pieces, leaves, add)


# Not a closure: one that calls itself is a cycle, and would keep the pieces alive until the garbage collector comes.
def _value(block: LeafBlock, pieces: Mapping[LeafBlock, T], leaves: int, add: Callable[[T, T], T]) -> T:
    if block in pieces:
        return pieces[block]
    if block.size == 1:
        raise KeyError(f"no piece covers leaf {block.first}")
    half = block.size // 2
    left = _value(LeafBlock(block.first, half), pieces, leaves, add)
    if block.first + half >= leaves:
        return left
    return add(left, _value(LeafBlock(block.first + half, half), pieces, leaves, add))
