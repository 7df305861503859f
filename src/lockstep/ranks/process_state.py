"""The state of a process on this machine, for a rank that missed its heartbeats.

Lockstep reads it from Linux itself. psutil computes the start time of a process from the wall clock. If the clock is
set in between, psutil would take the process for a different process. On other systems the state is unknown, and the
rank is lost only after the timeout.
"""

import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal

State = Literal["runs", "gone", "unknown"]

_STATE: Final = 0  # index into the fields of /proc/PID/stat after the name, which may hold spaces and brackets
_STARTED: Final = 19
_STATES: Final[dict[str, State]] = {"R": "runs", "S": "runs", "D": "runs", "Z": "gone", "X": "gone"}  # T is stopped


def identity() -> str:
    """Return an identifier of this process that is unique across all hosts, or "" if the system doesn't provide it."""
    with suppress(OSError):
        return f"{_numbers_of()} {os.getpid()} {_stat(os.getpid())[_STARTED]}"
    return ""


def state(process: str) -> State:
    """Return the state of the process with this `identity`: "unknown" if it is stopped or not visible from here."""
    try:
        numbers, number, started = process.rsplit(" ", 2)
        if numbers != _numbers_of():
            return "unknown"
        pid = int(number)
    except (OSError, ValueError):
        return "unknown"
    try:
        fields = _stat(pid)
    except OSError:
        return "gone"
    return _STATES.get(fields[_STATE], "unknown") if fields[_STARTED] == started else "gone"


def _numbers_of() -> str:
    """Return an identifier that is shared by all processes that can see each other.

    It consists of the boot ID, the PID namespace and the host name. The host name is included because one machine can
    simulate several hosts with separate networks. A rank on such a host must be lost when its network is cut.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')} {socket.gethostname()}"


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
