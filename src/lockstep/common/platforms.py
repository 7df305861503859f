"""What systems other than Linux do in another way; none of it was ever run there (docs/limits.md)."""

import os
from importlib.util import find_spec

from lockstep.common.control_groups import quota_cores
from lockstep.errors import UsageError


def need_posix(what: str) -> None:
    """Raise UsageError where this system has no file locks, user ids and signals of POSIX, as Windows."""
    if find_spec("fcntl") is None:
        raise UsageError(
            f"{what} needs Linux or macOS: it locks run folders and ends processes as POSIX does; on Windows use WSL"
        )


def usable_cores() -> int:
    """Return how many cores this process may use, by its affinity and by what a container allows it."""
    try:
        bound = len(os.sched_getaffinity(0))
    except AttributeError:  # elsewhere than on Linux
        bound = os.cpu_count() or 1
    return max(1, min(bound, int(quota_cores() or bound)))


def has_gpu_driver() -> bool:
    """Return whether a driver of GPUs is here: without one torch, which is slow to import, finds no device."""
    return any(os.path.exists(driver) for driver in ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd"))


def reserve(descriptor: int, length: int) -> None:
    """Give a file its length, and where the system can also the room on the disk: a full one is noticed here."""
    try:
        os.posix_fallocate(descriptor, 0, length)
    except AttributeError:
        os.ftruncate(descriptor, length)
