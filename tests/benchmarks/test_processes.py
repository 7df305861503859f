"""Contestants run in processes of their own, the slowest process counts, and failures are told."""

import os
import time
from functools import partial

import pytest
import torch

from benchmarks.processes import Contestant, Turn, take_measured_turns, take_turns
from lockstep.comm.world import World

pytestmark = [pytest.mark.slow("other programs, or minutes"), pytest.mark.worlds]


def rank_and_turn(world: World) -> Turn:
    taken = iter(range(100))
    return lambda: float(world.add_(torch.tensor([world.rank * 10 + next(taken) / 10]))) + world.rank


def fail(how: str, _: World) -> Turn:
    if how == "raise":
        raise ValueError("no such data")
    os._exit(3)


def test_the_slowest_process_counts_and_the_first_turn_does_not() -> None:
    assert take_turns({"both": Contestant(rank_and_turn, 2)}, 2)["both"] == pytest.approx([11.2, 11.4])


def busy(_: World) -> Turn:
    def turn() -> float:
        began = time.process_time()
        while time.process_time() - began < 0.1:
            pass
        time.sleep(0.2)
        return 1.0

    return turn


def test_cpu_seconds_are_those_of_all_processes_without_their_sleep() -> None:
    seconds, cpu_seconds = take_measured_turns({"both": Contestant(busy, 2)}, 1)
    assert seconds == {"both": [1.0]}
    assert 0.2 <= cpu_seconds["both"][0] < 0.3


@pytest.mark.parametrize(("how", "said"), [("raise", "no such data"), ("exit", "a process ended before its turn did")])
def test_a_contestant_that_fails_is_named(how: str, said: str) -> None:
    with pytest.raises(RuntimeError, match=f"(?s)unlucky.*{said}"):
        take_turns({"unlucky": Contestant(partial(fail, how))}, 1)
