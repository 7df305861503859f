"""Ranks share a step's micro-batches and an epoch's validation batches; what they are left with makes the tree."""

from collections.abc import Iterable, Sequence
from itertools import product
from math import prod
from typing import get_args

from brackets import alone, bracketed, counted
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.core.mesh import Axis, DataRank, Mesh
from lockstep.core.tree import BinaryCounter, sum_pieces

SIZES = st.integers(1, 5)
SHORT = st.integers(1, 3)
LEAVES = st.integers(1, 40)
MESHES = st.tuples(SHORT, SHORT, SHORT, SHORT).map(lambda axes: Mesh(*axes))


def data_ranks(mesh: Mesh) -> list[DataRank]:
    return [mesh.get_data_rank(rank) for rank in range(mesh.size)]


def assert_one_ranks_own(places: Iterable[DataRank], leaves: int) -> None:
    own = [index for place in places for index, dummy in place.get_microbatches(leaves) if not dummy]
    assert sorted(own) == list(range(leaves))


def assert_evaluated_once(places: Sequence[DataRank], batches: int, together: int = 1) -> None:
    """Each batch by one rank; so many ranks have as many turns as each other."""
    turns = [place.get_evaluation_batches(batches) for place in places]
    assert sorted(number for own in turns for number in own if number is not None) == list(range(batches))
    for first in range(0, len(turns), together):
        assert len({len(own) for own in turns[first : first + together]}) == 1


@given(MESHES)
def test_coordinates_count_the_last_axis_first(mesh: Mesh) -> None:
    found = [mesh.get_coordinates(rank) for rank in range(mesh.size)]
    assert found == [Mesh(*each) for each in product(*map(range, mesh))]
    assert [mesh.get_rank(mesh.get_coordinates(rank)) for rank in range(mesh.size)] == list(range(mesh.size))


@given(MESHES, st.sets(st.sampled_from(get_args(Axis))))
def test_a_group_has_the_ranks_that_differ_along_its_axes_alone(mesh: Mesh, axes: set[Axis]) -> None:
    groups = mesh.get_groups(*axes)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.size))
    for group in groups:
        assert group == sorted(group)
        assert len(group) == prod(getattr(mesh, axis) for axis in axes)
        others = {
            tuple(getattr(mesh.get_coordinates(rank), axis) for axis in mesh._fields if axis not in axes)
            for rank in group
        }
        assert len(others) == 1


@settings(deadline=None)
@given(st.builds(Mesh, SHORT, SHORT, SHORT, st.just(1), SHORT, SHORT), LEAVES)
def test_each_micro_batch_has_one_primary_rank_on_any_mesh(mesh: Mesh, leaves: int) -> None:
    ranks = data_ranks(mesh)
    assert all(
        each._replace(reports_results=True) in ranks and each._replace(sequence_index=0) in ranks for each in ranks
    )
    assert_evaluated_once([each for each in ranks if each.reports_results], leaves)
    assert_one_ranks_own([each for each in ranks if each.counts_microbatches], leaves)


def test_golden_meshes() -> None:
    assert Mesh(replicate=2, shard=3).get_groups("shard") == [[0, 1, 2], [3, 4, 5]]
    assert Mesh(replicate=2, shard=3).get_groups("replicate") == [[0, 3], [1, 4], [2, 5]]
    assert Mesh(pipe=2, shard=2, tensor=2).get_groups("tensor") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert Mesh(pipe=2, shard=2, tensor=2).get_groups("pipe", "tensor") == [[0, 1, 4, 5], [2, 3, 6, 7]]


@given(SIZES, SIZES, LEAVES)
def test_each_micro_batch_is_one_ranks_own(replicas: int, members: int, leaves: int) -> None:
    places = data_ranks(Mesh(replicas, shard=members))
    assert_one_ranks_own(places, leaves)
    assert all(0 <= index < leaves for place in places for index, _ in place.get_microbatches(leaves))


@given(SIZES, SIZES, LEAVES)
def test_members_go_through_as_many_rounds_as_each_other(replicas: int, members: int, leaves: int) -> None:
    places = data_ranks(Mesh(replicas, shard=members))
    for replica in range(replicas):
        ours = places[replica * members : (replica + 1) * members]
        assert len({len(place.get_microbatches(leaves)) for place in ours}) == 1
        if members > 1:
            assert ours[0].get_microbatches(leaves)
        for number, (first, holders) in enumerate(ours[0].get_rounds(leaves)):
            held = [place.get_microbatches(leaves)[number] for place in ours]
            assert [index for index, dummy in held if not dummy] == list(range(first, first + holders))


@given(SIZES, SIZES, LEAVES)
def test_replicas_in_step_have_as_many_rounds_as_each_other(replicas: int, in_step: int, leaves: int) -> None:
    places = data_ranks(Mesh(replicas, expert=in_step))
    assert_one_ranks_own(places, leaves)
    assert_evaluated_once(places, leaves, in_step)
    for first in range(0, len(places), in_step):
        [rounds] = {len(place.get_microbatches(leaves)) for place in places[first : first + in_step]}
        assert in_step == 1 or rounds


def test_golden_rounds_in_step() -> None:
    assert [place.get_microbatches(5) for place in data_ranks(Mesh(expert=3))] == [
        [(0, False), (1, False)],
        [(2, False), (3, False)],
        [(4, False), (4, True)],
    ]


def test_alone_nothing_is_a_dummy() -> None:
    assert DataRank().get_microbatches(3) == [(0, False), (1, False), (2, False)]
    assert DataRank(3, 4).get_microbatches(2) == []  # a replica of one rank has nobody to keep company


def test_golden_rounds() -> None:
    assert [place.get_microbatches(5) for place in data_ranks(Mesh(shard=3))] == [
        [(0, False), (3, False)],
        [(1, False), (4, False)],
        [(2, False), (4, True)],
    ]


@given(SIZES, SIZES, LEAVES)
def test_what_all_hold_is_the_tree(replicas: int, members: int, leaves: int) -> None:
    pieces = {}
    for place in data_ranks(Mesh(replicas, shard=members)):
        held = counted(index for index, dummy in place.get_microbatches(leaves) if not dummy).pop_pieces()
        assert list(held) == place.get_own_blocks(leaves)
        pieces |= held
    assert sum_pieces(pieces, leaves, bracketed) == alone(leaves)


@given(SIZES, SIZES, st.integers(0, 40))
def test_each_validation_batch_is_evaluated_once(replicas: int, members: int, batches: int) -> None:
    places = data_ranks(Mesh(replicas, shard=members))
    assert_evaluated_once(places, batches, members)
    if members == 1:
        assert not any(number is None for place in places for number in place.get_evaluation_batches(batches))


@given(SHORT, SHORT, SHORT, SHORT, st.integers(1, 2), st.integers(1, 9))
def test_ranks_share_the_chunks_of_sequences(
    replicate: int, shard: int, context: int, own: int, tensor: int, microbatches: int
) -> None:
    own = own if shard == 1 else 1
    mesh, chunks = Mesh(replicate=replicate, shard=shard, context=context, tensor=tensor), context * own
    places = data_ranks(mesh)
    pieces = {}
    for place in places:
        found = counted(
            chunk * microbatches + index
            for index, dummy in place.get_microbatches(
                microbatches
            )  # as an engine goes: its chunks of one, then of the next
            for chunk in range(place.sequence_index * own, (place.sequence_index + 1) * own)
            if not dummy
        ).pop_pieces()
        assert list(found) == place.get_own_blocks(microbatches * chunks, chunks)
        pieces |= found
    assert sum_pieces(pieces, microbatches * chunks, bracketed) == alone(microbatches * chunks)
    assert_one_ranks_own([each for each in places if each.counts_microbatches], microbatches)
    # The members of a replica evaluate together.
    together = shard * context if shard > 1 else 1
    assert_evaluated_once([each for each in places if each.reports_results], microbatches, together)


@given(SIZES, SIZES, LEAVES)
def test_what_ranks_in_step_hold_together_is_merged(replicas: int, in_step: int, leaves: int) -> None:
    for first in range(0, replicas * in_step, in_step):
        joined = BinaryCounter[str](lambda left, right: left + right)
        for rank in range(first, first + in_step):
            for block in DataRank(rank, replicas * in_step).get_own_blocks(leaves):
                joined.add_block(block, "")
        assert [*joined.pop_pieces()] == DataRank(
            first, replicas * in_step, num_summed_replicas=in_step
        ).get_own_blocks(leaves)
