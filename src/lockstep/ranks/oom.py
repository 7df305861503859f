"""Out-of-memory kills: the killed process can't report them, so other processes know its peak and count the kills.

The values are read from Linux itself, because psutil has neither the kill counter nor, on Linux, the peak (VmHWM).
"""

from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Final, final

_VMSTAT: Final = Path("/proc/vmstat")


def kills() -> int:
    """Return how many processes the kernel of this host has killed for lack of memory, including limits of cgroups."""
    with suppress(OSError, ValueError):
        for line in _VMSTAT.read_text(encoding="ascii").splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0  # not Linux, or a kernel without this counter


def peak_bytes(process: int | str = "self") -> int:
    """Return the peak resident memory of a process in bytes, or 0 if it isn't known."""
    with suppress(OSError, ValueError):
        for line in Path("/proc", str(process), "status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    return 0


KILLED: Final = "out of memory: the kernel killed a process on this host"


@final
class Killed:
    """Counts recent out-of-memory kills on this host. Create it before the processes start.

    The host may be shared, so older kills say nothing about this run. Call `look` at equal intervals as long as all
    processes are fine. Kills that happened before the last `looks` calls are ignored.
    """

    def __init__(self, looks: int) -> None:
        self._counts = deque([kills()], maxlen=looks)

    def look(self) -> None:
        """Record that all processes are fine, regardless of any kills some seconds ago."""
        self._counts.append(kills())

    def words(self, peak: int) -> str:
        """Return a message if memory ran out, and the peak memory of a process. `peak` is in bytes."""
        if kills() > self._counts[0]:
            return "; ".join(filter(None, [KILLED, had(peak)]))
        return had(peak)


def had(peak: int) -> str:
    """Return a message with the peak memory of a process, or "" if `peak` (in bytes) is unknown."""
    return f"it used up to {peak / 2**20:,.0f} MiB" if peak else ""
