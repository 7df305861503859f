"""What ranks agree on after each step, and that one which is elsewhere is noticed."""

import pytest
import worlds

from lockstep.comm.world import World
from lockstep.errors import UsageError

pytestmark = [pytest.mark.slow("several ranks"), pytest.mark.worlds]


def noted(world: World) -> str:
    world.set_compared_values({"lr": 7})
    world.agree_on_stop_level(0)
    world.set_compared_values({"lr": 8 + world.rank, "clip": None}, "loop.py:9")
    world.agree_on_stop_level(1)
    world.set_compared_values({})
    with pytest.raises(UsageError) as refused:
        world.agree_on_stop_level(0)
    assert world.agree_on_stop_level(0) == 1
    return str(refused.value)


def noted_more(world: World) -> str:
    world.set_compared_values(dict.fromkeys(["lr", "clip"][: 3 - world.rank], 7))
    world.agree_on_stop_level(0)
    world.set_compared_values({})
    with pytest.raises(UsageError) as refused:
        world.compare_positions(1)
    return str(refused.value)


def met(world: World, places: list[int]) -> tuple[int, int] | None:
    """Come together as often as it takes; the last time at these places."""
    world.agree_on_stop_level(2)
    assert world.compare_positions(3) is None
    assert world.agree_on_stop_level(0) == 2
    return world.compare_positions(places[world.rank])


def stayed_behind(world: World) -> str:
    if world.rank == 1:
        return str(world.compare_positions(4))
    world.agree_on_stop_level(0)
    with pytest.raises(UsageError) as refused:
        world.agree_on_stop_level(0)
    return str(refused.value)


def said(world: World, figures: list[dict[str, float]], meets: bool) -> bool:
    world.add_metrics(figures[world.rank])
    if meets:
        world.compare_positions(1)
    else:
        world.agree_on_stop_level(0)
        world.agree_on_stop_level(0)
    found = world.metrics_differ
    world.agree_on_stop_level(0)
    world.compare_positions(1)
    assert not world.metrics_differ
    return found


def test_ranks_that_update_otherwise_are_refused_by_the_next_call() -> None:
    [found] = {*worlds.run(2, noted)}
    assert found.startswith("lr: rank 1 differs from rank 0: 9, not 8 (loop.py:9); compute it from step.number")
    [found] = {*worlds.run(3, noted_more)}
    assert found.startswith("clip: rank 2 differs from rank 0: null, not 7; ")


def test_ranks_that_are_not_at_one_place_learn_who_is_elsewhere() -> None:
    assert worlds.run(3, met, [5, 5, 5]) == [None] * 3
    assert worlds.run(3, met, [5, 5, 2]) == [(2, 2), (2, 2), (5, 1)]
    assert worlds.run(3, met, [2, 5, 5]) == [(5, 2), (2, 0), (2, 0)]


def test_a_rank_that_went_on_to_its_next_step_is_met() -> None:
    assert worlds.run(2, stayed_behind) == [
        "rank 1 did not start its next step when this rank did; make the same calls on all ranks between two steps",
        "(0, 0)",
    ]


@pytest.mark.parametrize("meets", [True, False])
def test_figures_that_differ_between_the_ranks_that_have_some_are_noticed(meets: bool) -> None:
    assert worlds.run(3, said, [{"hits": 1.0}, {"hits": 2.0}, {}], meets) == [True] * 3
    assert worlds.run(3, said, [{"hits": 1.0}, {}, {}], meets) == [False] * 3
    assert worlds.run(3, said, [{"hits": 1.0}] * 3, meets) == [False] * 3
    assert worlds.run(3, said, [{}] * 3, meets) == [False] * 3


def test_one_process_is_everywhere() -> None:
    assert worlds.run(1, World.compare_positions, 5) == [None]
    assert worlds.run(1, said, [{"hits": 1.0}], True) == [False]
