"""Detects out-of-memory kills. A killed process can't report the kill, so other processes track memory and count kills.

The values are read directly from Linux, because psutil doesn't provide the kill counter or, on Linux, the peak memory
(VmHWM).
"""

from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Final, final

_VMSTAT: Final = Path("/proc/vmstat")


def count_kills() -> int:
    """Return the number of out-of-memory kills on this host, including kills due to cgroup limits."""
    with suppress(OSError, ValueError):
        for line in _VMSTAT.read_text(encoding="ascii").splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0  # not Linux, or the kernel doesn't have this counter


def get_peak_bytes(process: int | str = "self") -> int:
    """Return the peak resident memory of a process in bytes, or 0 if unknown."""
    with suppress(OSError, ValueError):
        for line in Path("/proc", str(process), "status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    return 0


KILL_DESCRIPTION: Final = "out of memory: the kernel killed a process on this host"


@final
class KillDetector:
    """Detects whether an out-of-memory kill on this host can explain a lost process. Create it before processes start.

    The host may be shared with other jobs, so older kills may be unrelated to this run. Call `record_healthy` at
    regular intervals while all processes are healthy. Kills before the last `num_polls` calls are ignored.
    """

    def __init__(self, num_polls: int) -> None:
        self._counts = deque([count_kills()], maxlen=num_polls)

    def record_healthy(self) -> None:
        """Record that all processes are healthy, so earlier kills can't explain a later failure."""
        self._counts.append(count_kills())

    def describe_memory(self, peak_bytes: int) -> str:
        """Describe the peak memory of a lost process, `peak_bytes`, and whether the host ran out of memory."""
        if count_kills() > self._counts[0]:
            return "; ".join(filter(None, [KILL_DESCRIPTION, describe_peak(peak_bytes)]))
        return describe_peak(peak_bytes)


def describe_peak(peak_bytes: int) -> str:
    """Describe the peak memory of a process in bytes. Returns "" if `peak_bytes` is 0 (unknown)."""
    return f"it used up to {peak_bytes / 2**20:,.0f} MiB" if peak_bytes else ""
