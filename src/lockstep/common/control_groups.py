"""The control group limits of this process, as set by containers. Linux only."""

from pathlib import Path
from typing import Final

from lockstep.common.plainfile import read_text_or_empty

_ROOT: Final = Path("/sys/fs/cgroup")
_CGROUP_FILE: Final = Path("/proc/self/cgroup")


def read_cpu_limit(root: Path = _ROOT, cgroup_file: Path = _CGROUP_FILE) -> float | None:
    """Return the CPU limit of this process's control groups in cores, or None if there is no limit."""
    quotas = []
    for folder in _list_group_folders(root, cgroup_file, "cpu"):
        quota, _, period = read_text_or_empty(folder / "cpu.max").partition(
            " "
        )  # cgroup v2: "150000 100000" or "max 100000"
        if not quota:
            # cgroup v1 uses two files. The quota is -1 if there is no limit.
            quota, period = (
                read_text_or_empty(folder / "cpu.cfs_quota_us"),
                read_text_or_empty(folder / "cpu.cfs_period_us"),
            )
        if quota.isdecimal() and period.isdecimal():
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def read_memory_limit(root: Path = _ROOT, cgroup_file: Path = _CGROUP_FILE) -> int | None:
    """Return the memory limit of this process's control groups in bytes, or None if there is no limit."""
    limits = []
    for folder in _list_group_folders(root, cgroup_file, "memory"):
        text = read_text_or_empty(folder / "memory.max") or read_text_or_empty(folder / "memory.limit_in_bytes")
        if text.isdecimal() and int(text) < 2**60:  # cgroup v1 reports a huge number if there is no limit
            limits.append(int(text))
    return min(limits, default=None)


def _list_group_folders(root: Path, cgroup_file: Path, controller: str) -> list[Path]:
    """Return the folders of this process's control group and its parent groups. The limits of all of them apply."""
    folders = []
    for line in read_text_or_empty(cgroup_file).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            top = root / controller if controllers else root
            folder = Path(path.lstrip("/"))
            folders += [top / part for part in (folder, *folder.parents)]
    return folders
