"""Contestants run in processes of their own, the slowest process counts, and failures are told."""

import os
from functools import partial

import pytest
import torch

from benchmarks.processes import Contestant, Turn, take_turns
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


@pytest.mark.parametrize(("how", "said"), [("raise", "no such data"), ("exit", "a process ended before its turn did")])
def test_a_contestant_that_fails_is_named(how: str, said: str) -> None:
    with pytest.raises(RuntimeError, match=f"(?s)unlucky.*{said}"):
        take_turns({"unlucky": Contestant(partial(fail, how))}, 1)
