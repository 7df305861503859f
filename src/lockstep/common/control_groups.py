"""The limits of the control groups of this process, as set by containers. Only on Linux."""

from pathlib import Path
from typing import Final

from lockstep.common.plainfile import shown_text

_ROOT: Final = Path("/sys/fs/cgroup")
_OWN: Final = Path("/proc/self/cgroup")


def quota_cores(root: Path = _ROOT, own: Path = _OWN) -> float | None:
    """Return the CPU time that the control groups of this process allow, in cores, or None if there is no limit."""
    found = []
    for folder in _groups(root, own, "cpu"):
        quota, _, period = shown_text(folder / "cpu.max").partition(" ")  # version 2: "150000 100000", or "max 100000"
        if not quota:
            # -1 if there is no limit
            quota, period = shown_text(folder / "cpu.cfs_quota_us"), shown_text(folder / "cpu.cfs_period_us")
        if quota.isdecimal() and period.isdecimal():
            found.append(int(quota) / int(period))
    return min(found, default=None)


def limit_bytes(root: Path = _ROOT, own: Path = _OWN) -> int | None:
    """Return the bytes of memory that the control groups of this process allow, or None if there is no limit."""
    found = []
    for folder in _groups(root, own, "memory"):
        text = shown_text(folder / "memory.max") or shown_text(folder / "memory.limit_in_bytes")
        if text.isdecimal() and int(text) < 2**60:  # version 1 writes a huge number if there is no limit
            found.append(int(text))
    return min(found, default=None)


def _groups(root: Path, own: Path, controller: str) -> list[Path]:
    """Return the folders of the control group of this process and of its parents, which also limit the process."""
    folders = []
    for line in shown_text(own).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            top = root / controller if controllers else root
            place = Path(path.lstrip("/"))
            folders += [top / part for part in (place, *place.parents)]
    return folders
