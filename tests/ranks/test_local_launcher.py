"""Workers on this machine, and which of them is blamed; tests/commands lets runs fail."""

import errno
import multiprocessing
import multiprocessing.util
import os
import pickle
import resource
import signal
import socket
import time
from functools import partial
from pathlib import Path

import pytest
from waiting import QUICK

from lockstep.config.load import load
from lockstep.errors import EXIT_FAILED, EXIT_PREFLIGHT, PreflightError, TrainingError
from lockstep.ranks.failure import Failure
from lockstep.ranks.local_launcher import WorkerExit, find_first_failure, run_workers
from lockstep.ranks.rendezvous import Rendezvous
from lockstep.run import training
from lockstep.runs.folder import RunStart
from lockstep.setup.resolved import resolve_config


def note(folder: Path, rendezvous: Rendezvous) -> int:
    """Be a worker that says who it is, and what rank 0 told it."""
    info = rendezvous.info
    (folder / str(info.rank)).write_text(f"{info.size} {info.local_rank} {rendezvous.broadcast_text('hello')}")
    return info.rank


@pytest.mark.slow("starts a Python of its own")
def test_spawned_workers_meet_and_the_largest_exit_code_counts(tmp_path):
    assert run_workers(partial(note, tmp_path), 2, "spawn", 60.0) == 1
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["2 0 hello", "2 1 hello"]


def stay(failing: Path, rendezvous: Rendezvous) -> int:
    """Be a worker that fails, with no room for its words in any file, or one that is stopped and so does not end."""
    if rendezvous.info.rank == 0:
        rendezvous.broadcast_text("")
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        failing.touch()
        raise TrainingError("gone wrong")
    rendezvous.broadcast_text()
    os.kill(os.getpid(), signal.SIGSTOP)
    return 0


def test_a_stopped_worker_does_not_outlive_a_failure_for_long(tmp_path, capsys):
    failing = tmp_path / "failing"
    assert run_workers(partial(stay, failing), 2, "fork", 60.0, tmp_path, timing=QUICK) == 1
    assert time.time() - failing.stat().st_mtime < 25  # torch alone would wait for 30 s
    said = capsys.readouterr().err
    assert said.startswith("[rank 0 of 2, ")
    assert said.endswith("] error: gone wrong\n")


def leave(leaving: tuple[int, ...], rendezvous: Rendezvous) -> int:
    """Be a worker that waits for rank 0, or leaves without a word."""
    if rendezvous.info.rank in leaving:
        os._exit(0)
    rendezvous.broadcast_text()
    return 0


@pytest.mark.parametrize("leaving", [(0,), (0, 1)])
def test_a_worker_that_exits_with_0_before_its_work_is_done_has_failed(leaving, capsys):
    assert run_workers(partial(leave, leaving), 2, "fork", 60.0, timing=QUICK) == EXIT_FAILED
    said = capsys.readouterr().err
    assert "] error: exited with code 0 before it finished; the other ranks were stopped" in said
    assert said.startswith("[rank 0 of 2, ") or leaving == (0, 1)


def test_a_worker_that_crashes_after_its_work_was_done_has_done_it(capsys):
    assert run_workers(crash_at_exit, 2, "fork", 60.0, timing=QUICK) == 0
    assert capsys.readouterr().err == ""


def crash_at_exit(_: Rendezvous) -> int:
    multiprocessing.util.Finalize(None, os.kill, (os.getpid(), signal.SIGKILL), exitpriority=1)
    return 0


LOST = Failure(0, 3, "a", "error: lost another rank", secondary=True, time=1.0)
OWN = Failure(0, 3, "a", "error: gone wrong", time=3.0)


@pytest.mark.parametrize(
    ("ends", "first"),
    [
        ([WorkerExit(0, 0, 1.0, reported_code=0), WorkerExit(1, 0, 1.0, reported_code=75)], None),
        ([WorkerExit(0, 1, 1.0, failure=LOST), WorkerExit(1, -9, 2.0)], 1),  # killed, and seen late
        ([WorkerExit(0, 1, 1.0, failure=LOST), WorkerExit(1, 0, 2.0)], 1),  # os._exit(0)
        ([WorkerExit(0, 1, 1.0, failure=LOST), WorkerExit(1, 1, 3.1, failure=OWN)], 1),
        ([WorkerExit(0, -6, 3.2), WorkerExit(1, -9, 2.0), WorkerExit(2, 1, 3.1, failure=OWN)], 1),
        ([WorkerExit(0, -6, 3.2), WorkerExit(1, 1, 3.3, failure=OWN)], 1),  # it is the time of the error that counts
        ([WorkerExit(0, 0, 5.0, reported_code=0), WorkerExit(1, 1, 1.0, failure=LOST)], 1),  # nobody knows more
    ],
)
def test_the_cause_is_the_first_failure_that_is_no_lost_peer(ends: list[WorkerExit], first: int | None) -> None:
    found = find_first_failure(ends)
    assert (found.rank if found else None) == first


def limited(kind: int, room: int) -> None:
    """Start workers where the user may have only so much more of a thing."""
    signal.alarm(60)  # it must not hang
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    resource.setrlimit(kind, (room, room))
    try:
        run_workers(partial(leave, ()), 8, "fork", 60.0)
    except PreflightError as error:
        os.write(2, error.terminal_text.encode())
        os._exit(error.exit_code)


def test_a_limit_on_open_files_is_named(capfd):
    starting = multiprocessing.get_context("fork").Process(target=limited, args=(resource.RLIMIT_NOFILE, 32))
    starting.start()
    starting.join()
    said = capfd.readouterr().err
    assert starting.exitcode == EXIT_PREFLIGHT, said
    assert (
        "Too many open files: this process has reached its limit on open files (ulimit -n); the limits are 32 files"
        in said
    )


def test_a_worker_that_cannot_be_started_ends_those_that_were(monkeypatch):
    fork, forks = os.fork, []

    def fork_once() -> int:
        if forks:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        forks.append(fork())
        return forks[0]

    monkeypatch.setattr(os, "fork", fork_once)
    with pytest.raises(
        PreflightError, match=r"cannot start rank 1: .* has reached its limit on processes \(ulimit -u\)"
    ):
        run_workers(partial(leave, ()), 3, "fork", 60.0, timing=QUICK)
    with pytest.raises(ProcessLookupError):
        os.kill(forks[0], 0)


def test_a_loopback_interface_that_is_down_is_named_at_once(monkeypatch):
    def unreachable(*_args, **_options):
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr(socket, "create_connection", unreachable)
    with pytest.raises(PreflightError, match=r"the loopback interface does not work \(Network is unreachable\)"):
        run_workers(partial(leave, ()), 2, "fork", 60.0, timing=QUICK)


def test_what_a_worker_of_a_run_needs_can_be_sent_to_a_spawned_process():
    start = RunStart(Path("run"), None)
    sent = partial(training.run_rank, resolve_config(load("digits")), start, None)
    assert pickle.loads(pickle.dumps(sent)).args[1] == start  # noqa: S301
