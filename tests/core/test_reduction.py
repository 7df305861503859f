"""What moves in a sum over ranks: each part of a vector has one rank, and what one sends is what the other takes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.core.mesh import DataRank
from lockstep.core.reduction import FAN_OUT, Reduction, Shares, VectorPart, plan_reduction
from lockstep.core.tree import LeafBlock

RANKS = st.lists(st.integers(0, 50), min_size=1, max_size=40, unique=True).map(tuple)
LENGTHS = st.integers(0, 200)


def contiguous(size: int, leaves: int) -> Reduction:
    return plan_reduction([DataRank(rank, size).get_own_blocks(leaves) for rank in range(size)], leaves)


@given(RANKS, LENGTHS)
def test_shares_are_all_of_a_vector_once(ranks: tuple[int, ...], length: int) -> None:
    shares = Shares(ranks)
    parts = [VectorPart(rank, shares.get_part(rank, length)) for rank in ranks]
    assert [number for _, part in parts for number in part] == list(range(length))
    assert [*shares.find_overlaps(range(length), length)] == [each for each in parts if each.element_range]
    assert not shares.get_part(51, length)


@given(RANKS, RANKS)
def test_joined_ranks_are_those_of_either_once(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    joined = Shares(left).union(Shares(right))
    assert sorted(joined.ranks) == sorted({*left, *right})
    if set(left) == set(right):
        assert joined in (Shares(left), Shares(right))  # half of it need not move


def test_joined_ranks_keep_what_they_have() -> None:
    assert Shares((0, 1)).union(Shares((2, 3))).ranks == (0, 2, 1, 3)
    assert Shares((0, 1)).union(Shares((2,))).ranks == (0, 2, 1)


@given(st.integers(2, 40), st.integers(1, 90), LENGTHS)
def test_what_is_sent_is_what_is_taken(size: int, leaves: int, length: int) -> None:
    for _, moves in contiguous(size, leaves).rounds:
        for move in moves:
            ranks = {*move.source.ranks, *move.target.ranks}
            sent = {(rank, *each) for rank in ranks for each in move.get_sent_parts(rank, length)}
            taken = {
                (peer, rank, part)
                for rank in ranks
                for peer, part in move.get_received_parts(rank, length)
                if peer != rank
            }
            assert sent == taken


@given(st.integers(2, 40), LENGTHS)
def test_what_is_gathered_is_the_whole(size: int, length: int) -> None:
    shares = Shares(tuple(range(size)))
    known = [{*shares.get_part(rank, length)} for rank in range(size)]
    for passes in zip(*(shares.iterate_gather_rounds(rank, length) for rank in range(size)), strict=True):
        before = [set(each) for each in known]
        for rank, (sent, received) in enumerate(passes):
            for peer, part in sent:
                assert VectorPart(rank, part) in passes[peer][1]
                assert 0 <= part.start <= part.stop <= length
                assert before[rank] >= set(part)
            known[rank] |= {number for _, part in received for number in part}
    assert known == [set(range(length))] * size


def test_what_ranks_hold_moves_at_once() -> None:
    # 22 leaves on 2 ranks: three blocks each, whose sums depend on each other. No round waits for another.
    assert [len(moves) for _, moves in contiguous(2, 22).rounds] == [6, 0]


def test_who_meets_very_many_sends_to_some_who_go_on() -> None:
    [alone] = [move for _, moves in contiguous(257, 257).rounds for move in moves if move.source.ranks == (256,)]
    assert len(alone.target.ranks) == FAN_OUT


def test_a_rank_is_given_what_it_takes_part_in_alone() -> None:
    rounds, _ = contiguous(4, 4).for_rank(2)
    assert [[sum_[:2] for sum_ in sums] for sums, _ in rounds] == [[], [(2, 3)], [(0, 2)]]
    assert [[move.block for move in moves] for _, moves in rounds] == [[2, 3], [0, 2], []]


@pytest.mark.parametrize("held", [[[(0, 1)], []], [[(0, 1)], [(0, 1), (1, 1)]], [[(0, 1)], [(2, 1)]]])
def test_blocks_that_are_not_all_leaves_once_are_refused(held: list[list[tuple[int, int]]]) -> None:
    with pytest.raises(KeyError):
        plan_reduction([[LeafBlock(*block) for block in own] for own in held], 2)
