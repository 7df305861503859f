"""Commands of several hosts: all end when one does, and nothing is left, whoever ends first and how."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from waiting import ended, until

from lockstep.common.interrupts import DUPLICATES_S
from lockstep.launchers.hosts import CommandExit, run_on_hosts

# What stands in for `ssh HOST python -m lockstep.common.follow_parent ...`: it ends when its stdin does.
WAITS = ("sh", "-c", 'echo $$ > "$0"; cat > /dev/null; exit 9')
STAYS = ("sh", "-c", 'echo $$ > "$0"; trap "" TERM; for i in $(seq 500); do sleep 0.02; done')
SAVES = ("sh", "-c", 'echo $$ > "$0"; trap "sleep 0.5; exit 75" TERM; while :; do sleep 0.02; done')
# Ends with 3 once the command of host a has written its number; its own place is "b".
FAILS_AFTER_A_BEGAN = ("sh", "-c", 'until [ -s "${0%b}a" ]; do sleep 0.01; done; exit 3')
# Before the end of host a's command: until something was said.
WHEN_SAID = 'until [ -e "${0%a}said" ]; do sleep 0.01; done'

# The whole of it in a process of its own, to be sent signals: `python -c PROGRAM PATIENCE FOLDER`.
PROGRAM = f"""
import sys
from lockstep.launchers.hosts import run_on_hosts
stop_s, folder, kind = float(sys.argv[1]), sys.argv[2], sys.argv[3]
command = {{"waits": {WAITS!r}, "stays": {STAYS!r}, "saves": {SAVES!r}}}[kind]
commands = {{name: [*command, f"{{folder}}/{{name}}"] for name in "ab"}}
ended = run_on_hosts(commands, print, stop_s, is_local=kind == "saves")
sys.exit(ended.code)
"""


def pid(file: Path) -> int:
    until(lambda: file.exists() and file.read_text(encoding="utf-8").endswith("\n"))
    return int(file.read_text(encoding="utf-8"))


def run(
    tmp_path: Path, a: Sequence[str], b: Sequence[str], stop_s: float = 10.0, needed: int | None = None
) -> tuple[CommandExit, list[str]]:
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        (tmp_path / "said").touch()

    commands = {"a": [*a, str(tmp_path / "a")], "b": [*b, str(tmp_path / "b")]}
    return run_on_hosts(commands, say, stop_s, needed), said


def test_all_end_well(tmp_path: Path) -> None:
    end, said = run(tmp_path, ["true"], ["sh", "-c", "sleep 0.1"])
    assert (end.code, said) == (0, [])


@pytest.mark.parametrize(("ends", "code"), [("exit 3", 3), ("kill -9 $$", 137)])  # as shells count
def test_one_that_fails_ends_the_others(tmp_path: Path, ends: str, code: int) -> None:
    end, said = run(tmp_path, WAITS, ["sh", "-c", ends])
    assert end == CommandExit("b", code)
    assert said == [f"b ended with exit code {code}; ending a"]


@pytest.mark.parametrize(("then", "expected"), [("sleep 0.3", CommandExit("a", 0)), ("exit 4", CommandExit("b", 3))])
def test_one_that_fails_leaves_as_many_as_are_needed(tmp_path: Path, then: str, expected: CommandExit) -> None:
    end, said = run(tmp_path, ["sh", "-c", f"{WHEN_SAID}; {then}"], ["sh", "-c", "exit 3"], 0.1, needed=1)
    assert end == expected
    assert said == ["b ended with exit code 3; continuing with a"]


def test_who_does_not_end_is_killed(tmp_path: Path) -> None:
    began = time.monotonic()
    end, _ = run(tmp_path, STAYS, FAILS_AFTER_A_BEGAN, stop_s=0.3)
    assert end == CommandExit("b", 3)
    assert 0.3 < time.monotonic() - began < 5
    assert ended(pid(tmp_path / "a"))


def test_who_goes_on_after_another_ended_well_is_killed(tmp_path: Path) -> None:
    end, _ = run(tmp_path, ["true"], STAYS, stop_s=0.3)
    assert end == CommandExit("b", 137)


def test_a_command_that_is_not_there_leaves_no_other(tmp_path: Path) -> None:
    commands = {"a": [*WAITS, str(tmp_path / "a")], "b": ["/no/such/program"]}
    with pytest.raises(FileNotFoundError):
        run_on_hosts(commands, print)


def test_signals_are_as_before_afterwards(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    run(tmp_path, ["true"], ["true"])
    assert signal.getsignal(signal.SIGINT) == before


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[float, str], subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(stop_s: float, kind: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-u", "-c", PROGRAM, str(stop_s), str(tmp_path), kind]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_asks_all_to_end(start: Callable[..., subprocess.Popen[str]], tmp_path: Path, number: int) -> None:
    process = start(10, "waits")
    pids = [pid(tmp_path / name) for name in "ab"]
    os.killpg(process.pid, number)  # as a terminal does: to the whole group
    out, _ = process.communicate()
    assert process.returncode == 9  # what they ended with
    assert out.startswith(f"{signal.Signals(number).name}; ending a, b\n")
    assert all(map(ended, pids))


def test_a_rank_of_this_host_may_save_for_as_long_as_it_takes(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = start(0.1, "saves")
    pids = [pid(tmp_path / name) for name in "ab"]
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 75
    assert all(map(ended, pids))


def test_the_second_interrupt_kills(start: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    process = start(60, "stays")
    pids = [pid(tmp_path / name) for name in "ab"]
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "SIGINT; ending a, b\n"
    time.sleep(DUPLICATES_S)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 137
    assert all(map(ended, pids))


def test_killed_it_takes_what_waits_with_it(start: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    process = start(60, "waits")
    pids = [pid(tmp_path / name) for name in "ab"]
    os.kill(process.pid, signal.SIGKILL)
    until(lambda: all(map(ended, pids)))
