"""Reads the state of a process on this machine, to check on a rank that missed its heartbeats.

On Linux, the state is read directly from /proc. psutil derives the start time of a process from the wall clock, so it
would mistake the process for a different one after a clock change. On other systems, the state is unknown, and the rank
is only declared lost after the timeout.
"""

import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal

ProcessState = Literal["runs", "gone", "unknown"]

_STATE_FIELD: Final = 0  # index into the fields of /proc/PID/stat after the name, which may contain spaces
_START_TIME_FIELD: Final = 19
_STATES: Final[dict[str, ProcessState]] = {
    "R": "runs",
    "S": "runs",
    "D": "runs",
    "Z": "gone",
    "X": "gone",
}  # T (stopped) is unknown


def get_identity() -> str:
    """Return an identifier of this process that is unique across hosts, or "" on systems other than Linux."""
    with suppress(OSError):
        return f"{_get_pid_space()} {os.getpid()} {_read_stat(os.getpid())[_START_TIME_FIELD]}"
    return ""


def get_state(identity: str) -> ProcessState:
    """Return the state of the process with the identifier `identity`.

    Returns "unknown" if the process is stopped or isn't visible from this process.
    """
    try:
        pid_space, pid_text, start_time = identity.rsplit(" ", 2)
        if pid_space != _get_pid_space():
            return "unknown"
        pid = int(pid_text)
    except (OSError, ValueError):
        return "unknown"
    try:
        fields = _read_stat(pid)
    except OSError:
        return "gone"
    return _STATES.get(fields[_STATE_FIELD], "unknown") if fields[_START_TIME_FIELD] == start_time else "gone"


def _get_pid_space() -> str:
    """Return an identifier of the PID space of this process. Processes in the same PID space can see each other.

    The identifier consists of the boot ID, the PID namespace and the host name. The host name is included because a
    machine can simulate several hosts with separate networks. If such a network is disconnected, the ranks on it must
    be declared lost, although their processes are running.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')} {socket.gethostname()}"


def _read_stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
