"""Which cores a rank is bound to, on hosts that are made up."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.device.cores import CpuLocality, choose_cores, format_cores, parse_cores

ALL = parse_cores("0-15")
# Two nodes of four physical cores with two threads each.
LEFT, RIGHT = parse_cores("0-3,8-11"), parse_cores("4-7,12-15")
SIBLINGS = {core: core % 8 for core in ALL}


def seats(*nodes: frozenset[int], usable: frozenset[int] = ALL, host: str = "a") -> list[CpuLocality]:
    return [CpuLocality(host, near, usable, bool(ALL - usable)) for near in nodes]


@pytest.mark.parametrize(
    ("placed", "least", "cores", "why"),
    [
        # Each of eight ranks has one physical core, whole: both its threads.
        (
            seats(*[LEFT] * 4, *[RIGHT] * 4),
            1,
            ["0,8", "1,9", "2,10", "3,11", "4,12", "5,13", "6,14", "7,15"],
            "near its GPU, divided among 4 ranks",
        ),
        # Ranks of a node need not follow each other.
        (seats(LEFT, RIGHT, LEFT), 1, ["0-1,8-9", "4-7,12-15", "2-3,10-11"], None),
        # What cannot be cut evenly gives the first more.
        (seats(LEFT, LEFT, LEFT), 1, ["0-1,8-9", "2,10", "3,11"], None),
        (seats(RIGHT), 1, ["4-7,12-15"], "near its GPU"),
        # Ranks of other hosts take nothing.
        ([*seats(LEFT, LEFT), *seats(LEFT, LEFT, host="b")], 1, ["0-1,8-9", "2-3,10-11"] * 2, None),
        # Too few to share out are had together; also where the recipe's threads need more.
        (seats(*[LEFT] * 5), 1, ["0-3,8-11"] * 5, None),
        (seats(LEFT, LEFT), 5, ["0-3,8-11"] * 2, "near its GPU, shared by 2 ranks: too few to divide"),
        # A container or a job with some of the cores: nobody bound one rank and not another.
        (seats(LEFT, LEFT, RIGHT, usable=parse_cores("0-1,4,8-9")), 1, ["0,8", "1,9", "4"], None),
        (seats(LEFT, usable=parse_cores("2,5")), 1, ["2,5"], None),
        # Who was bound by a launcher stays where it is.
        (
            [*seats(LEFT, usable=parse_cores("4-5")), *seats(RIGHT, usable=parse_cores("0-1"))],
            1,
            ["4-5", "0-1"],
            "bound before it started",
        ),
        # Nothing is bound where the node is not known, nor where none of its cores may be used.
        (
            seats(frozenset(), frozenset()),
            1,
            ["0-15"] * 2,
            "the kernel does not report the cores near its GPU",
        ),
        (seats(LEFT, LEFT, usable=RIGHT), 1, ["4-7,12-15"] * 2, "none of the cores near its GPU are available to it"),
    ],
)
def test_cores_of_made_up_hosts(placed: list[CpuLocality], least: int, cores: list[str], why: str | None) -> None:
    found = [choose_cores(rank, placed, SIBLINGS, least) for rank in range(len(placed))]
    assert [format_cores(each.cores) for each in found] == cores
    assert why is None or {each.reason for each in found} == {why}


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
    assert parse_cores(format_cores(cores)) == cores


@pytest.mark.parametrize(
    ("text", "cores"),
    [("", []), ("7\n", [7]), ("0-2,4", [0, 1, 2, 4]), ("0-55,112-167", [*range(56), *range(112, 168)])],
)
def test_lists_of_linux(text, cores) -> None:
    assert sorted(parse_cores(text)) == cores
    assert format_cores(cores) == text.strip()
