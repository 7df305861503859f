"""`lockstep launch --on ssh` that is asked to end: the hosts have time to save, and its exit code says so."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import until

# A host whose torchrun ends with 1 when its stdin ends; first it does what the file `at_the_end` says.
SSH = """#!/bin/sh
echo > began
cat > /dev/null
. ./at_the_end
exit 1
"""
SAVED = 'echo \'{"event": "stopped", "time": 2.5, "exit_code": 75}\' > run/result.json'
WRONG = 'echo \'{"event": "failed", "time": 2.5, "exit_code": 2}\' > run/result.json'
OTHER = 'echo \'{"event": "failed", "time": 2.5, "exit_code": 1}\' > run/result.json'
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a program `ssh`, and a run that an earlier start left there, saved."""
    (tmp_path / "ssh").write_text(SSH, encoding="utf-8")
    (tmp_path / "ssh").chmod(0o755)
    (tmp_path / "hosts.txt").write_text("a\n", encoding="utf-8")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "result.json").write_text('{"event": "stopped", "time": 1.5, "exit_code": 75}')
    return tmp_path


def code(folder: Path, number: int, at_the_end: str, *, words: tuple[str, ...] = ("run.dir=run",)) -> int:
    """Start it, send it a signal once its host runs, and return its exit code."""
    (folder / "at_the_end").write_text(at_the_end, encoding="utf-8")
    line = [sys.executable, "-m", "lockstep", "launch", "--on", "ssh", "--hosts", "hosts.txt", "--", "train", "digits"]
    env = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    with subprocess.Popen([*line, *words], cwd=folder, env=env, stderr=subprocess.PIPE, text=True) as process:
        until((folder / "began").exists)
        process.send_signal(number)
        assert process.stderr.readline() == f"{signal.Signals(number).name}; ending a\n"
        return process.wait(60)


@pytest.mark.parametrize("number", SIGNALS)
def test_its_exit_code_says_that_the_run_is_saved(folder: Path, number: int) -> None:
    assert code(folder, number, SAVED) == (130 if number == signal.SIGINT else 75)


def test_its_exit_code_says_that_the_run_would_fail_again(folder: Path) -> None:
    assert code(folder, signal.SIGTERM, WRONG) == 2


BEYOND = pytest.mark.extended("what another start left is as good as nothing, which the gate has")


@pytest.mark.parametrize(
    "at_the_end", ["", pytest.param(OTHER, marks=BEYOND), pytest.param("rm run/result.json", marks=BEYOND)]
)
def test_it_does_not_where_this_start_saved_nothing(folder: Path, at_the_end: str) -> None:
    assert code(folder, signal.SIGTERM, at_the_end) == 1


def test_it_does_not_where_the_next_start_would_not_go_on(folder: Path) -> None:
    assert code(folder, signal.SIGTERM, SAVED, words=()) == 1


def test_a_hangup_that_nohup_had_ignored_is_ignored(folder: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the process started below takes it over
    try:
        (folder / "ssh").write_text("#!/bin/sh\nkill -HUP $PPID\nkill -TERM $PPID\nexit 1\n", encoding="utf-8")
        line = [sys.executable, "-m", "lockstep", "launch", "--on", "ssh", "--hosts", "hosts.txt", "--", "show"]
        env = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
        done = subprocess.run(line, cwd=folder, env=env, capture_output=True, text=True)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert "SIGHUP" not in done.stderr
