"""A command that is tied to whoever started it ends when that is gone, with all that it started itself."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from waiting import ended, until

pytestmark = pytest.mark.slow("runs whole commands")

# It writes its number and that of a child of its own, and waits.
COMMAND = 'echo $$ > "$0.pid"; sleep 60 & echo $! > "$0.child"; wait'
SAVES = f'trap "echo saved > $0.saved; exit 75" TERM; {COMMAND}'
STAYS = f'trap "" TERM; {COMMAND}; wait'

# A stop may come while the command is being started.
AT_ONCE = """
import os, pathlib, signal, subprocess, sys, time
from lockstep.common import follow_parent

class Popen(subprocess.Popen):
    def __init__(self, command, **words):
        super().__init__(command, **words)
        while not pathlib.Path(command[-1] + ".child").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

subprocess.Popen = Popen
sys.exit(follow_parent.run_until_stdin_closes(sys.argv[1:], 0))
"""

Start = Callable[..., subprocess.Popen[bytes]]


def gone(file: Path) -> bool:
    return ended(int(file.read_text(encoding="utf-8")))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts a shell command tied to this test, and waits until it runs."""
    started: list[subprocess.Popen[bytes]] = []

    def start(text: str, stop_s: float = 60.0, program: str = "") -> subprocess.Popen[bytes]:
        call = f"run_until_stdin_closes(sys.argv[1:], 0, {stop_s})"
        program = (
            program or f"import sys; from lockstep.common.follow_parent import run_until_stdin_closes; sys.exit({call})"
        )
        command = [sys.executable, "-c", program, "sh", "-c", text, str(tmp_path / "it")]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE))
        child = tmp_path / "it.child"
        until(lambda: child.exists() and child.read_text(encoding="utf-8").endswith("\n"))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_its_exit_code_is_that_of_the_command() -> None:
    command = [sys.executable, "-m", "lockstep.common.follow_parent", "sh", "-c"]
    for text, code in (("exit 5", 5), ("kill -9 $$", 137), ("true", 0)):
        with subprocess.Popen([*command, text], stdin=subprocess.PIPE) as process:
            assert process.wait(60) == code


def test_the_command_gets_the_secret_that_is_the_first_line_of_stdin() -> None:
    command = [
        sys.executable,
        "-m",
        "lockstep.common.follow_parent",
        "--secret",
        "sh",
        "-c",
        'test "$LOCKSTEP_JOB_SECRET" = "a b"',
    ]
    for line, code in ((b"a b\n", 0), (b"other\n", 1)):
        with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
            process.stdin.write(line)
            process.stdin.flush()
            assert process.wait(60) == code
    done = subprocess.run(command, input=b"no line", capture_output=True)
    assert done.returncode == 1
    assert b"--secret: expected a line with the secret of the job on stdin" in done.stderr


def test_a_host_whose_name_is_not_known_ends_it_in_a_line() -> None:
    for host, code in (("localhost", 7), ("no.such.host.invalid", 2)):
        command = [sys.executable, "-m", "lockstep.common.follow_parent", "--knows", host, "sh", "-c", "exit 7"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.wait(60) == code
            said = process.stderr.read()
        assert said.count("\n") == (code == 2)
        assert (f" cannot resolve host {host}, the rendezvous host of the job (" in said) == (code == 2)


def test_the_command_is_asked_to_end_when_stdin_does(start: Start, tmp_path: Path) -> None:
    process = start(SAVES)
    process.stdin.close()
    assert process.wait(60) == 75
    assert (tmp_path / "it.saved").exists()
    until(lambda: gone(tmp_path / "it.pid") and gone(tmp_path / "it.child"))


def test_a_command_that_stays_is_killed_with_all_of_its_own(start: Start, tmp_path: Path) -> None:
    process = start(STAYS, 0.2)
    process.stdin.close()
    assert process.wait(60) == 137
    until(lambda: gone(tmp_path / "it.pid") and gone(tmp_path / "it.child"))


def test_a_signal_goes_on_to_the_command(start: Start, tmp_path: Path) -> None:
    process = start(SAVES)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 75
    until(lambda: gone(tmp_path / "it.child"))


def test_a_signal_that_comes_while_the_command_starts_goes_on_too(start: Start, tmp_path: Path) -> None:
    assert start(SAVES, program=AT_ONCE).wait(60) == 75
    until(lambda: gone(tmp_path / "it.child"))


def test_killed_it_takes_the_command_with_it(start: Start, tmp_path: Path) -> None:
    process = start(COMMAND)
    process.kill()
    until(lambda: gone(tmp_path / "it.pid"))
    os.kill(int((tmp_path / "it.child").read_text(encoding="utf-8")), signal.SIGKILL)  # torchrun's see to it themselves
