"""Ranks share a step's micro-batches and an epoch's validation batches; what they are left with makes the tree."""

from itertools import product
from math import prod
from typing import get_args

from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.core.mesh import Axis, DataRank, Mesh
from lockstep.core.tree import Counter, LeafBlock, total

SIZES = st.integers(1, 5)
SHORT = st.integers(1, 3)
LEAVES = st.integers(1, 40)


def data_ranks(replicas: int, members: int) -> list[DataRank]:
    return [DataRank(rank // members, replicas, rank % members, members) for rank in range(replicas * members)]


@given(SHORT, SHORT, SHORT, SHORT)
def test_coordinates_count_the_last_axis_first(replicate: int, pipe: int, shard: int, tensor: int) -> None:
    mesh = Mesh(replicate, pipe, shard, tensor)
    found = [mesh.coordinate(rank) for rank in range(mesh.size)]
    assert found == [Mesh(*each) for each in product(*map(range, mesh))]
    assert [mesh.rank(mesh.coordinate(rank)) for rank in range(mesh.size)] == list(range(mesh.size))


@given(SHORT, SHORT, SHORT, SHORT, st.sets(st.sampled_from(get_args(Axis))))
def test_a_group_has_the_ranks_that_differ_along_its_axes_alone(
    replicate: int, pipe: int, shard: int, tensor: int, axes: set[Axis]
) -> None:
    mesh = Mesh(replicate, pipe, shard, tensor)
    groups = mesh.groups(*axes)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.size))
    for group in groups:
        assert group == sorted(group)
        assert len(group) == prod(getattr(mesh, axis) for axis in axes)
        others = {
            tuple(getattr(mesh.coordinate(rank), axis) for axis in mesh._fields if axis not in axes) for rank in group
        }
        assert len(others) == 1


@settings(deadline=None)
@given(SHORT, SHORT, SHORT, SHORT, SHORT, LEAVES)
def test_each_micro_batch_has_one_primary_rank_on_any_mesh(
    replicate: int, pipe: int, shard: int, tensor: int, context: int, leaves: int
) -> None:
    mesh = Mesh(replicate, pipe, shard, 1, context, tensor)
    ranks = [mesh.data_rank(rank) for rank in range(mesh.size)]
    assert all(each._replace(first=True) in ranks and each._replace(seat=0) in ranks for each in ranks)
    evaluated = [number for each in ranks if each.first for number in each.turns(leaves) if number is not None]
    assert sorted(evaluated) == list(range(leaves))
    own = [index for each in ranks if each.primary for index, dummy in each.indices(leaves) if not dummy]
    assert sorted(own) == list(range(leaves))


def test_golden_meshes() -> None:
    assert Mesh(replicate=2, shard=3).groups("shard") == [[0, 1, 2], [3, 4, 5]]
    assert Mesh(replicate=2, shard=3).groups("replicate") == [[0, 3], [1, 4], [2, 5]]
    assert Mesh(pipe=2, shard=2, tensor=2).groups("tensor") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert Mesh(pipe=2, shard=2, tensor=2).groups("pipe", "tensor") == [[0, 1, 4, 5], [2, 3, 6, 7]]


@given(SIZES, SIZES, LEAVES)
def test_each_micro_batch_is_one_ranks_own(replicas: int, members: int, leaves: int) -> None:
    dealt = [place.indices(leaves) for place in data_ranks(replicas, members)]
    assert sorted(index for own in dealt for index, dummy in own if not dummy) == list(range(leaves))
    assert all(0 <= index < leaves for own in dealt for index, _ in own)


@given(SIZES, SIZES, LEAVES)
def test_members_go_through_as_many_rounds_as_each_other(replicas: int, members: int, leaves: int) -> None:
    places = data_ranks(replicas, members)
    for replica in range(replicas):
        ours = places[replica * members : (replica + 1) * members]
        assert len({len(place.indices(leaves)) for place in ours}) == 1
        if members > 1:
            assert ours[0].indices(leaves)
        for number, (first, holders) in enumerate(ours[0].rounds(leaves)):
            held = [place.indices(leaves)[number] for place in ours]
            assert [index for index, dummy in held if not dummy] == list(range(first, first + holders))


@given(SIZES, SIZES, LEAVES)
def test_replicas_in_step_have_as_many_rounds_as_each_other(replicas: int, in_step: int, leaves: int) -> None:
    places = [Mesh(replicate=replicas, expert=in_step).data_rank(rank) for rank in range(replicas * in_step)]
    dealt = [place.indices(leaves) for place in places]
    assert sorted(index for own in dealt for index, dummy in own if not dummy) == list(range(leaves))
    turns = [place.turns(leaves) for place in places]
    assert sorted(number for own in turns for number in own if number is not None) == list(range(leaves))
    for first in range(0, len(places), in_step):
        assert len({len(own) for own in dealt[first : first + in_step]}) == 1
        assert len({len(own) for own in turns[first : first + in_step]}) == 1
        assert in_step == 1 or dealt[first]


def test_golden_rounds_in_step() -> None:
    assert [Mesh(expert=3).data_rank(rank).indices(5) for rank in range(3)] == [
        [(0, False), (1, False)],
        [(2, False), (3, False)],
        [(4, False), (4, True)],
    ]


def test_alone_nothing_is_a_dummy() -> None:
    assert DataRank().indices(3) == [(0, False), (1, False), (2, False)]
    assert DataRank(3, 4).indices(2) == []  # a replica of one rank has nobody to keep company


def test_golden_rounds() -> None:
    assert [place.indices(5) for place in data_ranks(1, 3)] == [
        [(0, False), (3, False)],
        [(1, False), (4, False)],
        [(2, False), (4, True)],
    ]


@given(SIZES, SIZES, LEAVES)
def test_what_all_hold_is_the_tree(replicas: int, members: int, leaves: int) -> None:
    def joined(left: str, right: str) -> str:
        return f"({left}{right})"

    pieces = {}
    for place in data_ranks(replicas, members):
        counter: Counter[str] = Counter(joined)
        for index, dummy in place.indices(leaves):
            if not dummy:
                counter.push(index, f"<{index}>")
        held = counter.pieces()
        assert list(held) == place.own_blocks(leaves)
        pieces |= held
    whole: Counter[str] = Counter(joined)
    for leaf in range(leaves):
        whole.push(leaf, f"<{leaf}>")
    assert total(pieces, leaves, joined) == total(whole.pieces(), leaves, joined)


@given(SIZES, SIZES, st.integers(0, 40))
def test_each_validation_batch_is_evaluated_once(replicas: int, members: int, batches: int) -> None:
    turns = [place.turns(batches) for place in data_ranks(replicas, members)]
    assert sorted(number for own in turns for number in own if number is not None) == list(range(batches))
    for replica in range(replicas):
        assert len({len(own) for own in turns[replica * members : (replica + 1) * members]}) == 1
    if members == 1:
        assert not any(number is None for own in turns for number in own)


@given(SHORT, SHORT, SHORT, SHORT, st.integers(1, 2), st.integers(1, 9))
def test_ranks_share_the_chunks_of_sequences(
    replicate: int, shard: int, context: int, own: int, tensor: int, microbatches: int
) -> None:
    own = own if shard == 1 else 1
    mesh, chunks = Mesh(replicate=replicate, shard=shard, context=context, tensor=tensor), context * own
    places = [mesh.data_rank(rank) for rank in range(mesh.size)]
    pieces = {}
    for place in places:
        counter = Counter(_bracketed)
        for index, dummy in place.indices(microbatches):  # as an engine goes: all its chunks of one, then of the next
            for chunk in range(place.seat * own, (place.seat + 1) * own) if not dummy else ():
                leaf = chunk * microbatches + index
                counter.push(leaf, str(leaf))
        found = counter.pieces()
        assert list(found) == place.own_blocks(microbatches * chunks, chunks)
        pieces |= found
    leaves = {LeafBlock(leaf, 1): str(leaf) for leaf in range(microbatches * chunks)}
    assert total(pieces, len(leaves), _bracketed) == total(leaves, len(leaves), _bracketed)
    primary = [index for each in places if each.primary for index, dummy in each.indices(microbatches) if not dummy]
    assert sorted(primary) == list(range(microbatches))
    turns = [each.turns(microbatches) for each in places if each.first]
    assert sorted(number for own in turns for number in own if number is not None) == list(range(microbatches))
    if shard > 1:  # the members of a replica evaluate together
        for first in range(0, len(turns), shard * context):
            assert len({len(own) for own in turns[first : first + shard * context]}) == 1


def _bracketed(left: str, right: str) -> str:
    return f"({left}+{right})"


@given(SIZES, SIZES, LEAVES)
def test_what_ranks_in_step_hold_together_is_merged(replicas: int, in_step: int, leaves: int) -> None:
    for first in range(0, replicas * in_step, in_step):
        joined = Counter[str](lambda left, right: left + right)
        for rank in range(first, first + in_step):
            for block in DataRank(rank, replicas * in_step).own_blocks(leaves):
                joined.take(block, "")
        assert [*joined.pieces()] == DataRank(first, replicas * in_step, spans=in_step).own_blocks(leaves)
