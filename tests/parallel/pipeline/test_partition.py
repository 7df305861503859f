"""The balanced cut is the best of all cuts: compared with trying each of them."""

from itertools import combinations, pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lockstep.parallel.pipeline.cut import split_by_cost


def test_the_dearest_part_is_as_cheap_as_it_can_be() -> None:
    assert split_by_cost([1.0, 1.0, 1.0, 3.0], 2, range(4), [True] * 4) == [3]
    assert split_by_cost([3.0, 1.0, 1.0, 1.0], 2, range(4), [True] * 4) == [1]
    assert split_by_cost([1.0] * 6, 3, range(6), [True] * 6) == [2, 4]


def test_the_other_parts_are_even_too() -> None:
    assert split_by_cost([9.0, 1.0, 1.0, 1.0, 1.0], 3, range(5), [True] * 5) == [1, 3]


def test_one_part_is_everything() -> None:
    assert split_by_cost([1.0, 2.0], 1, [], [False, True]) == []
    assert split_by_cost([1.0, 2.0], 1, [], [False, False]) is None


@pytest.mark.parametrize(("allowed", "needed"), [([1], [True] * 4), ([0, 4], [True] * 4), ([1, 2, 3], [False] * 4)])
def test_a_cut_that_does_not_exist_is_none(allowed: list[int], needed: list[bool]) -> None:
    assert split_by_cost([1.0] * 4, 3, allowed, needed) is None


# The best beginning of a part is none of the best cut's.
@example([(cost, cost != 0, cost in (0, 1)) for cost in (2, 0, 4, 0, 6, 1, 0, 7)], 4)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.booleans(), st.booleans()), min_size=1, max_size=8),
    st.integers(1, 5),
)
def test_no_other_cut_is_better(items: list[tuple[int, bool, bool]], parts: int) -> None:
    costs, needed = [float(cost) for cost, _, _ in items], [each for _, each, _ in items]
    allowed = [place for place, (_, _, each) in enumerate(items) if each]
    found = split_by_cost(costs, parts, allowed, needed)
    values = [_value(costs, needed, cut) for cut in combinations([p for p in allowed if p], parts - 1)]
    possible = [value for value in values if value is not None]
    if not possible:
        assert found is None
    else:
        assert _value(costs, needed, tuple(found)) == min(possible)


def _value(costs: list[float], needed: list[bool], cut: tuple[int, ...]) -> tuple[float, float] | None:
    ends = [0, *cut, len(costs)]
    ranges = [range(start, stop) for start, stop in pairwise(ends)]
    if not all(any(needed[place] for place in each) for each in ranges):
        return None
    sums = [sum(costs[place] for place in each) for each in ranges]
    return max(sums), sum(each * each for each in sums)
