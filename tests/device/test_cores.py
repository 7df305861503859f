"""Which cores a rank is bound to, on hosts that are made up."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.device.cores import Seat, choose_cores, format_cores, parse

ALL = parse("0-15")
LEFT, RIGHT = parse("0-3,8-11"), parse("4-7,12-15")  # two nodes of four physical cores with two threads each
SIBLINGS = {core: core % 8 for core in ALL}


def seats(*nodes: frozenset[int], usable: frozenset[int] = ALL, host: str = "a") -> list[Seat]:
    return [Seat(host, near, usable, bool(ALL - usable)) for near in nodes]


def shares(placed: list[Seat], least: int = 1) -> list[str]:
    return [format_cores(choose_cores(rank, placed, SIBLINGS, least).cores) for rank in range(len(placed))]


def whys(placed: list[Seat], least: int = 1) -> set[str]:
    return {choose_cores(rank, placed, SIBLINGS, least).why for rank in range(len(placed))}


def test_two_nodes_with_four_cards_each() -> None:
    """Each rank has one physical core, whole: both its threads."""
    placed = seats(*[LEFT] * 4, *[RIGHT] * 4)
    assert shares(placed) == ["0,8", "1,9", "2,10", "3,11", "4,12", "5,13", "6,14", "7,15"]
    assert whys(placed) == {"near its card, shared out among 4 ranks"}


def test_the_ranks_of_a_node_need_not_follow_each_other() -> None:
    assert shares(seats(LEFT, RIGHT, LEFT)) == ["0-1,8-9", "4-7,12-15", "2-3,10-11"]


def test_what_cannot_be_cut_evenly_gives_the_first_more() -> None:
    assert shares(seats(LEFT, LEFT, LEFT)) == ["0-1,8-9", "2,10", "3,11"]


def test_one_rank_has_its_node() -> None:
    assert shares(seats(RIGHT)) == ["4-7,12-15"]
    assert whys(seats(RIGHT)) == {"near its card"}


def test_ranks_of_other_hosts_take_nothing() -> None:
    placed = [*seats(LEFT, LEFT), *seats(LEFT, LEFT, host="b")]
    assert shares(placed) == ["0-1,8-9", "2-3,10-11"] * 2


def test_too_few_to_share_out_are_had_together() -> None:
    placed = seats(*[LEFT] * 5)
    assert shares(placed) == ["0-3,8-11"] * 5


def test_threads_of_the_recipe_need_cores() -> None:
    assert shares(seats(LEFT, LEFT), least=5) == ["0-3,8-11"] * 2
    assert whys(seats(LEFT, LEFT), least=5) == {"near its card, as 2 ranks: too few to share out"}


def test_a_limit_of_all_ranks_is_shared_out() -> None:
    """A container or a job with some of the cores: nobody bound one rank and not another."""
    assert shares(seats(LEFT, LEFT, RIGHT, usable=parse("0-1,4,8-9"))) == ["0,8", "1,9", "4"]


def test_who_was_bound_by_a_launcher_stays_where_it_is() -> None:
    placed = [*seats(LEFT, usable=parse("4-5")), *seats(RIGHT, usable=parse("0-1"))]
    assert shares(placed) == ["4-5", "0-1"]
    assert whys(placed) == {"bound before it started"}


def test_so_does_a_single_rank() -> None:
    assert shares(seats(LEFT, usable=parse("2,5"))) == ["2,5"]


def test_nothing_is_bound_where_the_node_is_not_known() -> None:
    placed = seats(frozenset(), frozenset())
    assert shares(placed) == ["0-15"] * 2
    assert whys(placed) == {"the kernel does not say which cores are near its card"}


def test_nor_where_none_of_its_cores_may_be_used() -> None:
    placed = seats(LEFT, LEFT, usable=RIGHT)
    assert shares(placed) == ["4-7,12-15"] * 2
    assert whys(placed) == {"it may use none of the cores near its card"}


@given(
    nodes=st.lists(st.sets(st.integers(0, 15)).map(frozenset), min_size=1, max_size=9),
    usable=st.sets(st.integers(0, 15), min_size=1).map(frozenset),
    least=st.integers(1, 4),
)
def test_a_rank_always_has_cores_that_it_may_use(nodes, usable, least) -> None:
    placed = seats(*nodes, usable=usable)
    for rank in range(len(placed)):
        cores = choose_cores(rank, placed, SIBLINGS, least).cores
        assert cores
        assert cores <= usable


@given(st.sets(st.integers(0, 300)))
def test_lists_are_read_as_they_are_written(cores) -> None:
    assert parse(format_cores(cores)) == cores


@pytest.mark.parametrize(
    ("text", "cores"),
    [("", []), ("7\n", [7]), ("0-2,4", [0, 1, 2, 4]), ("0-55,112-167", [*range(56), *range(112, 168)])],
)
def test_lists_of_linux(text, cores) -> None:
    assert sorted(parse(text)) == cores
    assert format_cores(cores) == text.strip()
