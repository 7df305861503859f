"""However the leaves are shared out, the brackets stand where one process would put them."""

import math
import random
from itertools import pairwise

import pytest
from brackets import alone, bracketed, counted
from hypothesis import given
from hypothesis import strategies as st

from lockstep.core.tree import BinaryCounter, LeafBlock, split_into_blocks, sum_pieces

leaf_counts = st.integers(1, 70)


def shared(shares: list[range]) -> str:
    """Add the leaves of each share, then the pieces of all."""
    pieces: dict[LeafBlock, str] = {}
    for share in shares:
        pieces |= counted(share).pop_pieces()
    return sum_pieces(pieces, sum(map(len, shares)), bracketed)


def defined(first: int, stop: int, size: int) -> str:
    """Write the sum of a block as the definition says: halve; a half beyond the end is left out."""
    if size == 1:
        return str(first)
    half = size // 2
    left = defined(first, stop, half)
    return left if first + half >= stop else bracketed(left, defined(first + half, stop, half))


@pytest.mark.parametrize(
    ("leaves", "brackets"),
    [
        (1, "0"),
        (2, "(0+1)"),
        (3, "((0+1)+2)"),
        (4, "((0+1)+(2+3))"),
        (6, "(((0+1)+(2+3))+(4+5))"),
        (7, "(((0+1)+(2+3))+((4+5)+6))"),
    ],
)
def test_golden_brackets(leaves: int, brackets: str) -> None:
    assert alone(leaves) == brackets


@given(leaf_counts)
def test_one_process_adds_as_defined(leaves: int) -> None:
    assert alone(leaves) == defined(0, leaves, 128)


@given(leaf_counts, st.data())
def test_any_shares_give_the_brackets_of_one_process(leaves: int, data: st.DataObject) -> None:
    ends = sorted(data.draw(st.lists(st.integers(0, leaves), max_size=80)))
    edges = [0, *ends, leaves]
    assert shared([range(first, last) for first, last in pairwise(edges)]) == alone(leaves)


@given(leaf_counts, st.integers(0, 70))
def test_a_counter_holds_the_blocks_of_its_range(stop: int, start: int) -> None:
    leaves = range(min(start, stop), stop)
    assert list(counted(leaves).pop_pieces()) == split_into_blocks(leaves)


@given(leaf_counts)
def test_few_partial_sums_are_alive(leaves: int) -> None:
    alive = most = 0

    def add(left: str, right: str) -> str:
        nonlocal alive
        alive -= 1
        return bracketed(left, right)

    counter = BinaryCounter(add)
    for leaf in range(leaves):
        counter.push(leaf, str(leaf))
        alive += 1
        most = max(most, alive)
    assert most <= math.log2(leaves) + 1
    assert len(counter.pop_pieces()) == alive


@given(leaf_counts, leaf_counts)
def test_blocks_are_aligned_few_and_cover_the_range(start: int, stop: int) -> None:
    leaves = range(min(start, stop), max(start, stop))
    found = split_into_blocks(leaves)
    assert [leaf for block in found for leaf in range(block.first, block.first + block.size)] == list(leaves)
    assert all(block.first % block.size == 0 and block.size & (block.size - 1) == 0 for block in found)
    assert len(found) <= 2 * math.log2(len(leaves) + 1) + 1


def test_pieces_are_forgotten_once_given() -> None:
    counter = counted([0])
    assert counter.pop_pieces() == {LeafBlock(0, 1): "0"}
    assert counter.pop_pieces() == {}


@pytest.mark.parametrize(
    ("held", "missing"), [({LeafBlock(0, 1): "0"}, 1), ({LeafBlock(0, 2): "01", LeafBlock(3, 1): "3"}, 2)]
)
def test_a_gap_is_named(held: dict[LeafBlock, str], missing: int) -> None:
    with pytest.raises(KeyError, match=f"no piece covers leaf {missing}"):
        sum_pieces(held, max(block.first + block.size for block in held) + (missing == 1), bracketed)


def test_leaves_left_out_are_never_bridged() -> None:
    # 3 is a right child, as leaf 1 would be, but not the sibling of leaf 0.
    assert counted([0, 3]).pop_pieces() == {LeafBlock(0, 1): "0", LeafBlock(3, 1): "3"}


@given(leaf_counts, st.randoms())
def test_the_order_in_which_leaves_arrive_changes_no_bracket(leaves: int, order: random.Random) -> None:
    pieces = counted(order.sample(range(leaves), leaves)).pop_pieces()
    assert list(pieces) == split_into_blocks(range(leaves))
    assert sum_pieces(pieces, leaves, bracketed) == alone(leaves)
