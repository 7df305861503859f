"""Whether a process of this machine still runs, for a rank that has missed its heartbeats.

Read from Linux itself: psutil counts the start of a process from the wall clock, which may be set in the meantime, and
the process would then be taken for another. Elsewhere nothing is known, and a rank is waited for.
"""

import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal

State = Literal["runs", "gone", "unknown"]

_STATE: Final = 0  # of the fields of /proc/PID/stat that follow the name, which may have spaces and brackets
_STARTED: Final = 19
_STATES: Final[dict[str, State]] = {"R": "runs", "S": "runs", "D": "runs", "Z": "gone", "X": "gone"}  # T is stopped


def identity() -> str:
    """Return what identifies this process among all others of the world; "" where that is not known."""
    with suppress(OSError):
        return f"{_numbers_of()} {os.getpid()} {_stat(os.getpid())[_STARTED]}"
    return ""


def state(process: str) -> State:
    """Return the state of the process with this `identity`; unknown where it is stopped, or on another host."""
    try:
        numbers, number, started = process.rsplit(" ", 2)
        if numbers != _numbers_of():
            return "unknown"
        pid = int(number)
    except (OSError, ValueError):
        return "unknown"
    try:
        found = _stat(pid)
    except OSError:
        return "gone"
    return _STATES.get(found[_STATE], "unknown") if found[_STARTED] == started else "gone"


def _numbers_of() -> str:
    """Return what is the same for processes that see each other: the kernel's start, their name space, their host.

    Hosts may be several on one machine, with a network each: who is cut off there is not to be waited for.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')} {socket.gethostname()}"


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
