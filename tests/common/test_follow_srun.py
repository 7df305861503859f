"""A task ends when the program that `lockstep launch` became is gone, however that came about; and not before."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from waiting import until

pytestmark = [pytest.mark.slow("other programs, or minutes"), pytest.mark.cluster]

# Becomes a program that is no Python, and has a child, as srun has.
BECOMES = """
import os, sys
from lockstep.common.follow_parent import open_listening_socket
with open_listening_socket() as listening:
    with open(sys.argv[1] + ".new", "w") as file:
        file.write(str(listening.getsockname()[1]))
    os.rename(sys.argv[1] + ".new", sys.argv[1])
    os.execvp("sh", ["sh", "-c", "sleep 100 & echo $! > child; wait"])
"""
TASK = """
import os, signal, sys, time
from lockstep.common.follow_parent import follow_srun
if sys.argv[1] == "saves":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
elif sys.argv[1] == "stays":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("began", flush=True)  # before a thread can end it at once, where srun is gone
follow_srun(os.environ, stop_s=0.2)
while True:
    time.sleep(100)
"""

Task = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def srun(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start what stands in for srun, two processes; its port is in the file `port`."""
    line = [sys.executable, "-c", BECOMES, "port"]
    with subprocess.Popen(line, cwd=tmp_path, process_group=0) as process:
        child = tmp_path / "child"
        until(lambda: child.exists() and child.read_text(encoding="utf-8").endswith("\n"))
        yield process
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture
def task(tmp_path: Path) -> Iterator[Task]:
    """Return a function that starts a task, which says when it has begun."""
    started: list[subprocess.Popen[str]] = []

    def start(kind: str, **env: str) -> subprocess.Popen[str]:
        told = {"SLURM_SRUN_COMM_HOST": "127.0.0.1", "SLURM_PROCID": "0"}
        told["LOCKSTEP_SRUN_PORT"] = (tmp_path / "port").read_text(encoding="utf-8")
        line = [sys.executable, "-c", TASK, kind]
        started.append(
            subprocess.Popen(
                line, env={**os.environ, **told, **env}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
        assert started[-1].stdout.readline() == "began\n"
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def connections(port: str) -> int:
    """Return how many connections to a port there are, which /proc/net/tcp has in hexadecimal."""
    lines = Path("/proc/net/tcp").read_text(encoding="utf-8").splitlines()
    return sum(line.split()[2].endswith(f":{int(port):04X}") and line.split()[3] == "01" for line in lines[1:])


def test_a_task_ends_when_both_processes_are_killed(srun: subprocess.Popen[bytes], task: Task, tmp_path: Path) -> None:
    tasks = {kind: task(kind) for kind in ("saves", "stays", "neither")}
    until(lambda: connections((tmp_path / "port").read_text()) == len(tasks))
    srun.kill()
    time.sleep(0.3)
    assert all(each.poll() is None for each in tasks.values())  # the other one is there: srun's ends the tasks itself
    os.killpg(srun.pid, signal.SIGKILL)
    assert {kind: each.wait(60) for kind, each in tasks.items()} == {"saves": 75, "stays": -9, "neither": -15}


def test_a_task_that_comes_too_late_ends(srun: subprocess.Popen[bytes], task: Task) -> None:
    os.killpg(srun.pid, signal.SIGKILL)
    srun.wait()
    assert task("saves").wait(60) == 75


def test_a_task_that_cannot_reach_it_says_so_and_goes_on(srun: subprocess.Popen[bytes], task: Task) -> None:
    process = task("saves", SLURM_SRUN_COMM_HOST="no-such-host.invalid")
    assert "srun at no-such-host.invalid:" in process.stderr.readline()
    os.killpg(srun.pid, signal.SIGKILL)
    time.sleep(0.3)
    assert process.poll() is None


def test_what_launch_did_not_start_is_tied_to_nothing(srun: subprocess.Popen[bytes], task: Task) -> None:
    process = task("saves", LOCKSTEP_SRUN_PORT="")
    os.killpg(srun.pid, signal.SIGKILL)
    time.sleep(0.3)
    assert process.poll() is None
