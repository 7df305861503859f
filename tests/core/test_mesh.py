"""Places share a step's micro-batches and an epoch's validation batches; what they are left with makes the tree."""

from hypothesis import given
from hypothesis import strategies as st

from lockstep.core.mesh import Place
from lockstep.core.tree import Counter, total

SIZES = st.integers(1, 5)
LEAVES = st.integers(1, 40)


def grid(replicas: int, members: int) -> list[Place]:
    return [Place(rank // members, replicas, rank % members, members) for rank in range(replicas * members)]


@given(SIZES, SIZES, LEAVES)
def test_each_micro_batch_is_one_ranks_own(replicas: int, members: int, leaves: int) -> None:
    dealt = [place.indices(leaves) for place in grid(replicas, members)]
    assert sorted(index for own in dealt for index, dummy in own if not dummy) == list(range(leaves))
    assert all(0 <= index < leaves for own in dealt for index, _ in own)


@given(SIZES, SIZES, LEAVES)
def test_members_go_through_as_many_rounds_as_each_other(replicas: int, members: int, leaves: int) -> None:
    places = grid(replicas, members)
    for replica in range(replicas):
        ours = places[replica * members : (replica + 1) * members]
        assert len({len(place.indices(leaves)) for place in ours}) == 1
        if members > 1:
            assert ours[0].indices(leaves)
        for number, (first, holders) in enumerate(ours[0].rounds(leaves)):
            held = [place.indices(leaves)[number] for place in ours]
            assert [index for index, dummy in held if not dummy] == list(range(first, first + holders))


def test_alone_nothing_is_a_shadow() -> None:
    assert Place().indices(3) == [(0, False), (1, False), (2, False)]
    assert Place(3, 4).indices(2) == []  # a replica of one rank has nobody to keep company


def test_golden_rounds() -> None:
    assert [place.indices(5) for place in grid(1, 3)] == [
        [(0, False), (3, False)],
        [(1, False), (4, False)],
        [(2, False), (4, True)],
    ]


@given(SIZES, SIZES, LEAVES)
def test_what_all_hold_is_the_tree(replicas: int, members: int, leaves: int) -> None:
    def joined(left: str, right: str) -> str:
        return f"({left}{right})"

    pieces = {}
    for place in grid(replicas, members):
        counter: Counter[str] = Counter(joined)
        for index, dummy in place.indices(leaves):
            if not dummy:
                counter.push(index, f"<{index}>")
        held = counter.pieces()
        assert list(held) == place.held(leaves)
        pieces |= held
    whole: Counter[str] = Counter(joined)
    for leaf in range(leaves):
        whole.push(leaf, f"<{leaf}>")
    assert total(pieces, leaves, joined) == total(whole.pieces(), leaves, joined)


@given(SIZES, SIZES, st.integers(0, 40))
def test_each_validation_batch_is_evaluated_once(replicas: int, members: int, batches: int) -> None:
    turns = [place.turns(batches) for place in grid(replicas, members)]
    assert sorted(number for own in turns for number in own if number is not None) == list(range(batches))
    for replica in range(replicas):
        assert len({len(own) for own in turns[replica * members : (replica + 1) * members]}) == 1
    if members == 1:
        assert not any(number is None for own in turns for number in own)
