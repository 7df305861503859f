"""What differs between ranks is named with who has what."""

from typing import Any

import pytest

from lockstep.checkup.agreement import compare_ranks, describe_values, format_ranks

HOSTS = ["h0", "h0", "h1"]


def facts(**odd: Any) -> dict[str, Any]:
    return {
        "versions": {"python": "3.12", "torch": "2.15", "numpy": "2.0"},
        "numerics": {"cpu": "A"},
        "variables": {"OMP_NUM_THREADS": "1"},
        "cards": {"devices": []},
    } | odd


def test_alike() -> None:
    [found] = compare_ranks([facts(), facts(), facts()], HOSTS)
    assert (found.level, found.found) == ("ok", "versions, CPU, devices and variables are the same on 3 ranks")
    assert compare_ranks([facts()], ["h0"]) == []


@pytest.mark.parametrize(
    ("odd", "level", "first", "last"),
    [
        ({"versions": {"python": "3.12", "torch": "2.14", "numpy": "2.0"}}, "problem", "torch: 2.15", "2.14"),
        ({"versions": {"python": "3.12", "torch": "2.15"}}, "warning", "numpy: 2.0", "missing"),
        ({"numerics": {"cpu": "B"}}, "problem", "cpu: A", "B"),
        ({"variables": {"OMP_NUM_THREADS": "1", "NCCL_IB_DISABLE": "1"}}, "warning", "NCCL_IB_DISABLE: missing", "1"),
        ({"cards": {"devices": ["H200", "H200"]}}, "problem", "devices: the CPU", "H200"),
    ],
)
def test_what_differs_is_named(odd: dict[str, Any], level: str, first: str, last: str) -> None:
    [found] = compare_ranks([facts(), facts(), facts(**odd)], HOSTS)
    assert (found.level, found.found) == (level, f"{first} on rank 0 (h0), 1 (h0); {last} on rank 2 (h1)")


def test_what_a_launcher_gives_each_rank_may_differ() -> None:
    own = [facts(variables={"CUDA_VISIBLE_DEVICES": str(rank)}) for rank in range(3)]
    assert [each.level for each in compare_ranks(own, HOSTS)] == ["ok"]


def test_of_many_ranks_the_first_are_named() -> None:
    assert describe_values(["a"] * 3, HOSTS) == ""
    assert format_ranks(range(10), ["h"]) == "rank 0, 1, 2, 3, 4, 5, 6, 7 and 2 more"
