"""Functions that differ between operating systems. They have only been run on Linux so far (docs/limits.md)."""

import os
from importlib.util import find_spec

from lockstep.common.control_groups import read_cpu_limit
from lockstep.errors import UsageError


def require_posix(feature: str) -> None:
    """Raise UsageError on systems without POSIX file locks, user IDs and signals, such as Windows."""
    if find_spec("fcntl") is None:
        raise UsageError(
            f"{feature} requires Linux or macOS, because it uses POSIX file locks and signals; on Windows, use WSL"
        )


def count_usable_cores() -> int:
    """Return the number of cores that this process can use, given its affinity and the CPU limit of its container."""
    try:
        bound = len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        bound = os.cpu_count() or 1
    return max(1, min(bound, int(read_cpu_limit() or bound)))


def has_gpu_driver() -> bool:
    """Return whether a GPU driver is present. Without a driver, there is no need to import torch to look for GPUs."""
    return any(os.path.exists(driver) for driver in ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd"))


def reserve_disk_space(descriptor: int, num_bytes: int) -> None:
    """Set the length of a file. If possible, also reserve disk space, so that a full disk raises OSError here."""
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    except AttributeError:
        os.ftruncate(descriptor, num_bytes)
