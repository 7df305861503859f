"""When memory runs out the kernel kills a process, which cannot report it: others know its peak, and count the kills.

Read from Linux itself: psutil has neither the counter of kills nor, on Linux, a peak (VmHWM).
"""

from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Final, final

_VMSTAT: Final = Path("/proc/vmstat")


def kills() -> int:
    """Return how many processes the kernel of this host has killed for want of memory, limits of cgroups included."""
    with suppress(OSError, ValueError):
        for line in _VMSTAT.read_text(encoding="ascii").splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0  # no Linux, or one too old to count


def peak_bytes(process: int | str = "self") -> int:
    """Return the most memory that a process has had at once, resident; 0 where that is not to be known."""
    with suppress(OSError, ValueError):
        for line in Path("/proc", str(process), "status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    return 0


KILLED: Final = "out of memory: the kernel killed a process of this host"


@final
class Killed:
    """What there is to say of killed processes of this host; made before they start.

    The host may be shared, so what was killed long before is no news: call `look` at equal intervals, for as long as
    all is well; what was killed before the last `looks` of them does not count.
    """

    def __init__(self, looks: int) -> None:
        self._counts = deque([kills()], maxlen=looks)

    def look(self) -> None:
        """Note that nothing is wrong, whatever was killed some seconds ago."""
        self._counts.append(kills())

    def words(self, peak: int) -> str:
        """Say that memory ran out, if it did, and what a process had whose peak was so many bytes."""
        if kills() > self._counts[0]:
            return "; ".join(filter(None, [KILLED, had(peak)]))
        return had(peak)


def had(peak: int) -> str:
    """Say how much memory a process had, whose peak was so many bytes; nothing where that is not known."""
    return f"it had up to {peak / 2**20:,.0f} MiB" if peak else ""
