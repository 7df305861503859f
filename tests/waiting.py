"""Waits for what another process does, and with shorter times than ranks wait for each other."""

import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import psutil

from lockstep.ranks.timing import Timing

# What ranks of a test wait, which are there at once: about a fifth of what they do for users.
QUICK: Final = Timing(
    longest_poll_s=0.02,
    report_missing_s=0.2,
    report_missing_rank_0_s=0.2,
    late_timeout_s=5.0,
    linger_s=0.5,
    beat_s=0.1,
    silent_s=0.4,
    notice_timeout_s=0.6,
    report_timeout_s=1.0,
    leave_timeout_s=1.0,
    end_timeout_s=3.0,
    sigkill_delay_s=0.5,
    sample_s=0.1,
    answer_timeout_s=1.0,
)


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait for a condition, and fail where it does not come true in time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited for {seconds:.0f} s"
        time.sleep(0.01)


def ended(pid: int) -> bool:
    """Return whether a process is gone, or a zombie; it may go at any moment, also while it is looked at."""
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return True


def free_port() -> int:
    """Return a port of the loopback interface that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def below(pid: int) -> list[int]:
    """Return the processes that a process has started, and those that they have started, and so on."""
    return [each.pid for each in psutil.Process(pid).children(recursive=True)]


def killed(command: Sequence[str | Path], number: int, up: Path, least: int = 1) -> int:
    """Start a program that makes the file `up`, and send it a signal once so many run below it: none is left of them.

    Return its exit code.
    """
    with subprocess.Popen(command) as process:
        until(lambda: up.exists() and len(below(process.pid)) >= least)
        pids = below(process.pid)
        process.send_signal(number)
        code = process.wait(60)
    until(lambda: all(map(ended, pids)))
    return code
