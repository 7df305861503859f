"""Who waits long for others is told who is late, where, and who does not answer at all."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch
import worlds

from lockstep.runtime.stall import Place, StallWatch, told
from lockstep.runtime.world import World

PATIENCE_S = 0.4


def dawdle(reports: list[str]) -> None:
    """Be late until the reports say so, or a long time."""
    until = time.monotonic() + 20
    while not reports and time.monotonic() < until:
        time.sleep(0.05)


def kept_waiting(world: World, late: int, by: str) -> list[str]:
    """Let rank `late` keep the others waiting, and return what this rank was told."""
    reports: list[str] = []
    heard = torch.zeros(1)
    with StallWatch(world, lambda: 6, PATIENCE_S, reports.append):
        pids = torch.zeros(world.size, dtype=torch.int64)
        pids[world.rank] = os.getpid()
        pid = int(world.add_(pids)[late])
        if world.rank == late and by == "sleeping":
            time.sleep(4 * PATIENCE_S + 1)
        elif world.rank == late and by == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif by == "stopped" and world.rank == (late + 1) % world.size:
            threading.Thread(target=lambda: (dawdle(reports), os.kill(pid, signal.SIGCONT)), daemon=True).start()
        world.add_(heard)
        world.barrier()
    return reports


@pytest.mark.worlds
@pytest.mark.parametrize("late", [0, 1])
def test_a_late_rank_is_named_with_its_line_and_all_go_on(late: int) -> None:
    answers = worlds.run(3, kept_waiting, late, "sleeping")
    assert answers[late] == []
    assert any(answers)
    waiting = ", ".join(str(rank) for rank in range(3) if rank != late)
    for asker, report in ((rank, text) for rank, texts in enumerate(answers) for text in texts):
        first, *lines = report.splitlines()
        assert first.startswith(f"stalled: rank {asker} has waited ")
        assert lines[0].startswith(f"  rank {late} (")
        assert "is late: in step 7, " in lines[0]
        assert any("kept_waiting" in line for line in lines[1:9])
        assert lines[-1].startswith(f"  rank {waiting} waits: in step 7, lockstep/runtime/world.py:")


@pytest.mark.worlds
def test_a_stopped_rank_does_not_answer() -> None:
    answers = worlds.run(2, kept_waiting, 0, "stopped")
    assert answers[0] == []
    assert "  rank 0 does not answer: it is stopped, its host is gone, or cut off" in answers[1][0].splitlines()
    assert "  rank 1 waits: in step 7, lockstep/runtime/world.py:" in answers[1][0]


def quick(world: World) -> list[str]:
    reports: list[str] = []
    with StallWatch(world, lambda: 0, PATIENCE_S, reports.append):
        until = time.monotonic() + 4 * PATIENCE_S
        while world.add_(torch.tensor([float(time.monotonic() < until)])).item():
            time.sleep(0.01)
    return reports


@pytest.mark.worlds
def test_ranks_that_get_on_are_left_alone() -> None:
    assert worlds.run(2, quick) == [[], []]


def computing(world: World) -> list[str]:
    reports: list[str] = []
    with StallWatch(world, lambda: 0, PATIENCE_S, reports.append):
        time.sleep(4 * PATIENCE_S)  # both: nobody waits for anybody
    world.barrier()
    return reports


@pytest.mark.worlds
def test_long_work_is_no_stall() -> None:
    assert worlds.run(2, computing) == [[], []]


def test_waiting_ranks_are_listed_by_place_and_a_deadlock_is_told() -> None:
    here, there = "lockstep/runtime/world.py:9 add_", "lockstep/runtime/canonical.py:7 _wait"
    answers = {
        0: ("a", Place(4, ("train.py:1 main", here), True)),
        1: ("b", Place(4, ("train.py:1 main", there, "torch/distributed/x.py:3 wait"), True)),
        2: ("b", Place(4, ("train.py:1 main", here), True)),
    }
    assert told(answers, 0, 3, 61.2).splitlines() == [
        "stalled: rank 0 has waited 61 s for other ranks",
        f"  rank 0, 2 waits: in step 5, {here}",
        f"  rank 1 waits: in step 5, {there}",
        "  no rank is late: they wait for each other, in different places or over a link that is cut",
    ]
