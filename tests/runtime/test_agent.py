"""Workers on this machine, started anew as CUDA wants it; tests/commands holds what forked ones do."""

import os
import pickle
import resource
import signal
import time
from functools import partial
from pathlib import Path

from lockstep.commands import train
from lockstep.commands._training import Start
from lockstep.config.load import load
from lockstep.errors import TrainingError
from lockstep.runtime.agent import run_workers
from lockstep.runtime.meeting import Meeting


def note(folder: Path, meeting: Meeting) -> int:
    """Be a worker that says who it is, and what rank 0 told it."""
    info = meeting.info
    (folder / str(info.rank)).write_text(f"{info.size} {info.local_rank} {meeting.tell('hello')}")
    return info.rank


def test_spawned_workers_meet_and_the_largest_exit_code_counts(tmp_path):
    assert run_workers(partial(note, tmp_path), 2, "spawn", 60.0) == 1
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["2 0 hello", "2 1 hello"]


def stay(failing: Path, meeting: Meeting) -> int:
    """Be a worker that fails, with no room for its words in any file, or one that is stopped and so does not end."""
    if meeting.info.rank == 0:
        meeting.tell("")
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        failing.touch()
        raise TrainingError("gone wrong")
    meeting.tell()
    os.kill(os.getpid(), signal.SIGSTOP)
    return 0


def test_a_stopped_worker_does_not_outlive_a_failure_for_long(tmp_path, capsys):
    failing = tmp_path / "failing"
    assert run_workers(partial(stay, failing), 2, "spawn", 60.0, tmp_path) == 1
    assert time.time() - failing.stat().st_mtime < 25  # torch alone would wait for 30 s
    said = capsys.readouterr().err
    assert said.startswith("[rank 0 of 2, ")
    assert said.endswith("] error: gone wrong\n")


def test_what_a_worker_of_a_run_needs_can_be_sent_to_a_spawned_process():
    start = Start(Path("run"), None, 4)
    sent = partial(train._worker, load("digits"), start, None)
    assert pickle.loads(pickle.dumps(sent)).args[1] == start  # noqa: S301
