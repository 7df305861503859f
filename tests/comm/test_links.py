"""Who measures with whom, and what is measured: latency, bandwidth, clocks."""

import time
from dataclasses import asdict
from itertools import combinations
from typing import Any

import pytest
import torch.distributed as dist
import worlds
from hypothesis import given
from hypothesis import strategies as st

from lockstep.comm.links import MAX_ROUNDS, measure_links, schedule_rounds, schedule_tournament
from lockstep.comm.world import World


@given(st.integers(1, 40))
def test_in_a_tournament_each_meets_each_once_and_nobody_two_at_a_time(count: int) -> None:
    found = schedule_tournament(count)
    assert sorted(pair for pairs in found for pair in pairs) == list(combinations(range(count), 2))
    assert all(len({*sum(pairs, ())}) == 2 * len(pairs) for pairs in found)


def test_few_ranks_meet_pair_by_pair() -> None:
    assert schedule_rounds(["a", "a", "b"]) == [[(0, 1)], [(0, 2)], [(1, 2)]]
    assert schedule_rounds(["a"]) == []


def test_of_many_ranks_one_of_each_host_meets_each_other_host() -> None:
    hosts = [f"h{rank // 8}" for rank in range(64)]
    planned = schedule_rounds(hosts)
    pairs = [pair for each in planned for pair in each]
    within = [pair for pair in pairs if hosts[pair[0]] == hosts[pair[1]]]
    assert within[:2] == [(0, 1), (2, 3)]
    assert sorted(within) == [(rank, rank + 1) for rank in range(63) if rank % 8 < 7]
    assert sorted(set(pairs) - set(within)) == list(combinations(range(0, 64, 8), 2))
    assert all(len({*sum(each, ())}) == 2 * len(each) for each in planned)


def test_of_very_many_hosts_each_meets_a_stated_number() -> None:
    planned = schedule_rounds([f"h{rank}" for rank in range(400)])
    assert len(planned) == MAX_ROUNDS


def measured(world: World) -> list[dict[str, Any]]:
    return [asdict(link) for link in measure_links(world, schedule_rounds(["a"] * world.size))]


def measured_with_a_slow_rank(world: World, slow_rank: int) -> list[dict[str, Any]]:
    """Measure while one rank is late to receive more than a few bytes."""
    right = dist.recv

    def late(tensor: Any, *args: Any) -> Any:
        if len(tensor) > 1:
            time.sleep(len(tensor) / 1e6)  # 1 MB/s
        return right(tensor, *args)

    with pytest.MonkeyPatch.context() as patched:
        if world.rank == slow_rank:
            patched.setattr(dist, "recv", late)
        return measured(world)


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
def test_all_links_are_measured_in_both_directions() -> None:
    found = [link for each in worlds.run(3, measured) for link in each]
    assert {(link["source"], link["target"]) for link in found} == {(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)}
    assert all(0 < link["latency_s"] < 1 and link["mb_s"] > 0.1 for link in found)


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
def test_the_way_to_a_slow_rank_is_slow() -> None:
    found = [link for each in worlds.run(3, measured_with_a_slow_rank, 2) for link in each]
    to_it = [link["mb_s"] for link in found if link["target"] == 2]
    others = [link["mb_s"] for link in found if link["target"] != 2]
    assert max(to_it) < 1.1 < 3.5 < min(others)
