"""Who waits long for others is told who is late, where, and who does not answer at all."""

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import worlds
from waiting import QUICK

from lockstep.comm.world import World
from lockstep.common.rank import RankInfo
from lockstep.ranks import stall
from lockstep.ranks.external import join_ranks, make_single_process_rendezvous
from lockstep.ranks.rendezvous import Rendezvous
from lockstep.ranks.stall import StallDetector, ThreadState, make_stall_report
from lockstep.ranks.status import RankStatus

STALL_S = 0.4


def rendezvous(world: World, folder: Path, status: RankStatus = RankStatus("training", 6)) -> Rendezvous:  # noqa: B008 - frozen
    """Let the ranks of a world meet once more; say what this one does."""
    ranks = join_ranks(
        RankInfo(world.rank, world.size, world.rank, world.size, "test"), f"file://{folder}/meet", 20, QUICK
    )
    ranks.get_status = lambda: status
    return ranks


def dawdle(told: Path) -> None:
    """Be late until that was told, or a long time."""
    until = time.monotonic() + 20
    while not told.exists() and time.monotonic() < until:
        time.sleep(0.01)


def stop(watch: StallDetector) -> None:
    """Stop this process while its watch sleeps: who is stopped at the store, which is a file, keeps the others out."""
    while any(sys._current_frames()[each.ident or 0].f_code.co_name != "wait" for each in watch._threads):
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGSTOP)


def telling(folder: Path) -> tuple[list[str], Callable[[str], None]]:
    """Return a list, and what adds a report to it and lets who is late go on."""
    reports: list[str] = []

    def tell(report: str) -> None:
        reports.append(report)
        (folder / "told").touch()

    return reports, tell


def opened(world: World, late: int, folder: Path) -> list[str]:
    """Let rank `late` be late for a new process group, as one out of reach, and return what this rank told."""
    reports, tell = telling(folder)
    with StallDetector(rendezvous(world, folder, RankStatus()), STALL_S, tell):
        if world.rank == late:
            dawdle(folder / "told")
        world.duplicate()
        world.barrier()
    return reports


def behind_a_device(world: World, late: int, steps: tuple[int, ...], folder: Path) -> list[str]:
    """Wait for the others as one does with a GPU, which is a thread here, and return what this rank told."""
    reports, tell = telling(folder)
    ranks = rendezvous(world, folder, RankStatus("training", steps[world.rank]))
    with StallDetector(ranks, STALL_S, tell, waits_on_device=True), ThreadPoolExecutor(1) as device:
        if world.rank == late:
            device.submit(dawdle, folder / "told")
        device.submit(world.barrier).result()
    return reports


def kept_waiting(world: World, late: int, by: str, folder: Path) -> list[str]:
    """Let rank `late` keep the others waiting until one of them tells so, and return what this rank told."""
    reports, tell = telling(folder)
    heard = torch.zeros(1)
    world.barrier()  # the first to come is not to wait for the others before this begins
    with StallDetector(rendezvous(world, folder), STALL_S, tell) as watch:
        pids = torch.zeros(world.size, dtype=torch.int64)
        pids[world.rank] = os.getpid()
        pid = int(world.add_(pids)[late])
        if world.rank == late and by == "sleeping":
            dawdle(folder / "told")
        elif world.rank == late and by == "stopped":
            stop(watch)
        elif by == "stopped" and world.rank == (late + 1) % world.size:
            wakes = lambda: (dawdle(folder / "told"), os.kill(pid, signal.SIGCONT))  # noqa: E731
            threading.Thread(target=wakes, daemon=True).start()
        world.add_(heard)
        world.barrier()
    return reports


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
@pytest.mark.parametrize("late", [0, 1])
def test_a_late_rank_is_named_with_its_line_and_all_go_on(late: int, tmp_path: Path) -> None:
    answers = worlds.run(3, kept_waiting, late, "sleeping", tmp_path)
    assert answers[late] == []
    assert any(answers)
    waiting = ", ".join(str(rank) for rank in range(3) if rank != late)
    for asker, report in ((rank, text) for rank, texts in enumerate(answers) for text in texts):
        first, *lines = report.splitlines()
        assert first.startswith(f"stalled: rank {asker} has waited ")
        assert lines[0].startswith(f"  rank {late} (")
        assert "is late: in step 7, " in lines[0]
        assert any("kept_waiting" in line for line in lines[1:9])
        assert lines[-1].startswith(f"  rank {waiting} waits: in step 7, lockstep/comm/world.py:")


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
def test_a_stopped_rank_does_not_answer(tmp_path: Path) -> None:
    answers = worlds.run(2, kept_waiting, 0, "stopped", tmp_path)
    assert answers[0] == []
    assert "  rank 0 does not answer: stopped, hung or disconnected, or its host is down" in answers[1][0].splitlines()
    assert "  rank 1 waits: in step 7, lockstep/comm/world.py:" in answers[1][0]


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
def test_one_that_does_not_come_to_a_process_group_is_named(tmp_path: Path) -> None:
    reports = worlds.run(2, opened, 1, tmp_path)
    assert reports[1] == []
    first, late, *_, last = reports[0][0].splitlines()
    assert first.startswith("stalled: rank 0 has waited ")
    assert late.startswith("  rank 1 (")
    assert " is late: setting up, " in late
    assert last.startswith("  rank 0 waits: setting up, lockstep/comm/world.py:")


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
def test_where_waiting_is_not_seen_the_rank_with_fewer_steps_is_named(tmp_path: Path) -> None:
    answers = worlds.run(3, behind_a_device, 1, (8, 5, 8), tmp_path)
    for asker, report in ((rank, text) for rank, texts in enumerate(answers) for text in texts[:1]):
        first, behind, *lines = report.splitlines()
        assert first.startswith(f"stalled: rank {asker} has been at the same line for ")
        assert behind.startswith("  rank 1 (")
        assert " is behind: in step 6, " in behind
        assert any("behind_a_device" in line for line in lines[:8])
        [others] = [line for line in lines if line.startswith("  rank ")]
        assert others.startswith("  rank 0 (")
        assert ", 2 (" in others
        assert ") computes or waits: in step 9, " in others
    assert any(answers)


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
def test_where_waiting_is_not_seen_ranks_of_one_step_are_not_told_apart(tmp_path: Path) -> None:
    answers = worlds.run(2, behind_a_device, 1, (5, 5), tmp_path)
    report = next(text for texts in answers for text in texts)
    assert not any(words in report for words in (") is late: ", ") is behind: "))
    verdict = "  no rank is behind: a GPU or one of these threads is computing, and the other ranks wait"
    assert report.splitlines()[-1] == verdict


def quick(world: World, folder: Path) -> list[str]:
    reports: list[str] = []
    steps = 0
    ranks = rendezvous(world, folder)
    ranks.get_status = lambda: RankStatus("training", steps)
    with StallDetector(ranks, STALL_S, reports.append):
        until = time.monotonic() + 4 * STALL_S
        while world.add_(torch.tensor([float(time.monotonic() < until)])).item():
            steps += 1  # else a look that finds it in an exchange time and again would take it for one
            time.sleep(0.01)
    return reports


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
def test_ranks_that_get_on_are_left_alone(tmp_path: Path) -> None:
    assert worlds.run(2, quick, tmp_path) == [[], []]


def computing(world: World, status: RankStatus, hidden: bool, folder: Path) -> list[str]:
    reports: list[str] = []
    with StallDetector(rendezvous(world, folder, status), STALL_S, reports.append, waits_on_device=hidden):
        time.sleep(4 * STALL_S)  # both: nobody waits for anybody
    world.barrier()
    return reports


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
@pytest.mark.parametrize(("status", "hidden"), [(RankStatus("training", 6), False), (RankStatus("setting up"), True)])
def test_long_work_is_no_stall(status: RankStatus, hidden: bool, tmp_path: Path) -> None:
    assert worlds.run(2, computing, status, hidden, tmp_path) == [[], []]


def test_a_place_to_meet_that_is_gone_ends_the_watch_and_nothing_else() -> None:
    class Gone:
        def clone(self) -> None:
            raise RuntimeError("Connection was likely closed")

    ranks = make_single_process_rendezvous()
    ranks.store = Gone()
    with StallDetector(ranks, STALL_S, pytest.fail) as watch:
        watch._threads[1].join()  # an error of a thread fails a test


def test_waiting_ranks_are_listed_by_place_and_a_deadlock_is_told() -> None:
    here, there = "lockstep/comm/world.py:9 add_", "lockstep/comm/canonical.py:7 _wait"
    answers = {
        0: ("a", ThreadState(RankStatus("training", 4), ("train.py:1 main", here), True)),
        1: (
            "b",
            ThreadState(RankStatus("training", 4), ("train.py:1 main", there, "torch/distributed/x.py:3 wait"), True),
        ),
        2: ("b", ThreadState(RankStatus("training", 4), ("train.py:1 main", here), True)),
    }
    assert make_stall_report(answers, 3, "stalled: some time").splitlines() == [
        "stalled: some time",
        f"  rank 0, 2 waits: in step 5, {here}",
        f"  rank 1 waits: in step 5, {there}",
        "  no rank is late: the ranks wait for each other, at different places or over a broken link",
    ]


def test_every_file_that_waits_for_an_exchange_is_known_for_it() -> None:
    """A rank that waits in another would be reported late."""
    package = Path(stall.__file__).parents[2]
    waits = re.compile(r"\bwork\.wait\(\)|\bdist\.(recv|all_reduce)\(")
    files = [path for path in package.glob("lockstep/**/*.py") if waits.search(path.read_text(encoding="utf-8"))]
    found = {str(path.relative_to(package)) for path in files}
    assert "lockstep/comm/carrier.py" in found
    assert found <= {*stall._WAIT_MODULES}
