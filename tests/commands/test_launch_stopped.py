"""`lockstep launch --on ssh` that is asked to end: the hosts have time to save, and its exit code says so."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import put
from waiting import until

pytestmark = pytest.mark.slow("runs whole commands")

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
LINE = (sys.executable, "-m", "lockstep", "launch", "--on", "ssh", "--hosts", "hosts.txt", "--")


@pytest.fixture
def folder(programs: Path) -> Path:
    """Return a folder with a program `ssh`, and a run that an earlier start left there, saved."""
    put(programs, "ssh", SSH)
    (programs / "hosts.txt").write_text("a\n", encoding="utf-8")
    (programs / "run").mkdir()
    (programs / "run" / "result.json").write_text('{"event": "stopped", "time": 1.5, "exit_code": 75}')
    return programs


def code(folder: Path, number: int, at_the_end: str, *, words: tuple[str, ...] = ("run.dir=run",)) -> int:
    """Start it, send it a signal once its host runs, and return its exit code."""
    (folder / "at_the_end").write_text(at_the_end, encoding="utf-8")
    with subprocess.Popen([*LINE, "train", "digits", *words], stderr=subprocess.PIPE, text=True) as process:
        until((folder / "began").exists)
        process.send_signal(number)
        assert process.stderr.readline() == f"{signal.Signals(number).name}; ending a\n"
        return process.wait(60)


@pytest.mark.parametrize("number", SIGNALS)
def test_its_exit_code_says_that_the_run_is_saved(folder: Path, number: int) -> None:
    assert code(folder, number, SAVED) == (130 if number == signal.SIGINT else 75)


def test_its_exit_code_says_that_the_run_would_fail_again(folder: Path) -> None:
    assert code(folder, signal.SIGTERM, WRONG) == 2


BEYOND = pytest.mark.slow("what another start left is as good as nothing, which is the first case")


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
        put(folder, "ssh", "#!/bin/sh\nkill -HUP $PPID\nkill -TERM $PPID\nexit 1\n")
        done = subprocess.run([*LINE, "show"], capture_output=True, text=True)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert "SIGHUP" not in done.stderr
