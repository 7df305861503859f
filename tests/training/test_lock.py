"""A run folder has one run, whoever forks and whoever is killed."""

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lockstep.errors import UsageError
from lockstep.training.lock import lock

HOLDER = """
import sys, time
from pathlib import Path
from lockstep.training.lock import lock
held = lock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""

# The forked child stays when its parent is killed, as a loader worker may.
FORKING_HOLDER = """
import os, sys, time
from pathlib import Path
from lockstep.training.lock import lock
held = lock(Path(sys.argv[1]))
child = os.fork()
if child:
    print(child, flush=True)
time.sleep(60)
"""


def holder(script: str, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", script, str(folder)], stdout=subprocess.PIPE, text=True)


def first_line(process: subprocess.Popen[str]) -> str:
    return process.stdout.readline().strip()


def end(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()


def test_a_folder_in_use_names_its_holder_and_is_free_after_a_kill(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "a"
    process = holder(HOLDER, run)
    try:
        assert first_line(process) == "held"
        with pytest.raises(UsageError, match=rf"runs/a: in use by process {process.pid} on host .+; wait for it"):
            lock(run)
    finally:
        end(process)
    lock(run).release()


def test_release_frees_the_folder(tmp_path: Path) -> None:
    with lock(tmp_path) as held:
        with pytest.raises(UsageError, match=f"in use by process {os.getpid()} "):
            lock(tmp_path)
        held.release()
        with lock(tmp_path):
            held.release()  # closes nothing that it does not own
            with pytest.raises(UsageError, match="in use"):
                lock(tmp_path)


def test_a_forked_child_does_not_keep_the_lock_of_its_dead_parent(tmp_path: Path) -> None:
    process = holder(FORKING_HOLDER, tmp_path)
    child = int(first_line(process))
    try:
        with pytest.raises(UsageError, match="in use"):
            lock(tmp_path)
        process.kill()
        process.wait()
        os.kill(child, 0)  # still there
        lock(tmp_path).release()
    finally:
        os.kill(child, signal.SIGKILL)
        end(process)


def test_a_started_program_does_not_keep_the_lock(tmp_path: Path) -> None:
    held = lock(tmp_path)
    command = [sys.executable, "-c", "import time; print('started', flush=True); time.sleep(60)"]
    process = subprocess.Popen(command, close_fds=False, stdout=subprocess.PIPE, text=True)
    try:
        assert first_line(process) == "started"
        held.release()
        lock(tmp_path).release()
    finally:
        end(process)


def test_a_file_system_without_locks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(descriptor: int, operation: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", fails)
    with pytest.raises(
        UsageError,
        match=r"cannot lock files \(Function not implemented\).*choose a run\.dir on a different file system",
    ):
        lock(tmp_path)


@pytest.mark.parametrize("planted", ["link", "pipe", "device"])
def test_a_lock_that_is_no_plain_file_is_refused_and_not_written_to(tmp_path: Path, planted: str) -> None:
    victim, run = tmp_path / "victim", tmp_path / "run"
    victim.write_text("mine")
    run.mkdir()
    if planted == "pipe":
        os.mkfifo(run / "lock")
    else:
        (run / "lock").symlink_to(victim if planted == "link" else "/dev/zero")
    with pytest.raises(OSError, match=r"symbolic link|not a regular file"):
        lock(run)
    assert victim.read_text() == "mine"


def test_somebody_who_only_looks_keeps_no_run_from_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock(tmp_path).release()
    with (tmp_path / "lock").open() as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        # Who looks lets go while the lock waits for another try.
        monkeypatch.setattr(time, "sleep", lambda _: fcntl.flock(looking, fcntl.LOCK_UN))
        lock(tmp_path).release()


def test_a_folder_that_a_refused_start_removed_meanwhile_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = fcntl.flock

    def removed_meanwhile(descriptor: int, how: int) -> None:
        (tmp_path / "lock").unlink()
        take(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", removed_meanwhile)
    with pytest.raises(UsageError, match="another run that failed to start removed the folder; start again"):
        lock(tmp_path)
