"""What the file system of a folder does: how fast it writes, and whether it renames and locks as run folders need."""

from __future__ import annotations

import fcntl
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import psutil

_MIB: Final = 1 << 20
_LARGEST_MIB: Final = 64
_LIMIT_S: Final = 2.0  # of writing
_SYNCS: Final = 9


def storage(folder: Path) -> dict[str, Any]:
    """Return the file system that `folder` is or would be on, and what it does; `problem` where nothing can be written.

    It writes at most 64 MiB or for 2 s into a folder of its own beside what is there, and removes it.
    """
    place = existing(folder)
    usage = psutil.disk_usage(str(place))
    found: dict[str, Any] = {
        "folder": str(folder),
        "kind": kind(place),
        "free": usage.free,
        "all": usage.total,
        "problem": "",
    }
    try:
        with tempfile.TemporaryDirectory(prefix=".lockstep-doctor-", dir=place) as own:
            return found | _tried(Path(own))
    except OSError as error:
        return found | {"problem": error.strerror or str(error)}


def existing(folder: Path) -> Path:
    """Return the folder, or the nearest one around it that is there."""
    absolute = folder.absolute()
    return next(each for each in (absolute, *absolute.parents) if each.is_dir())


def kind(folder: Path) -> str:
    """Return the kind of the file system, such as ext4, tmpfs or nfs4; "" where the system does not list it."""
    path = Path(os.path.realpath(folder))
    mounts = [each for each in psutil.disk_partitions(all=True) if path.is_relative_to(each.mountpoint)]
    # Of two at one place the later one is on top.
    return max(enumerate(mounts), key=lambda each: (len(each[1].mountpoint), each[0]))[1].fstype if mounts else ""


def _tried(folder: Path) -> dict[str, Any]:
    return {"mb_s": _writing(folder), "sync_s": _syncing(folder), "renames": _renames(folder), "locks": _locks(folder)}


def _writing(folder: Path) -> float:
    """Return 10^6 bytes a second, written and synced."""
    block, written, began = os.urandom(_MIB), 0, time.perf_counter()
    with (folder / "large").open("wb") as file:
        while written < _LARGEST_MIB * _MIB and time.perf_counter() - began < _LIMIT_S:
            written += file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return written / (time.perf_counter() - began) / 1e6


def _syncing(folder: Path) -> float:
    """Return the seconds that a few bytes take until they are on the disk: the median."""
    seconds = []
    with (folder / "small").open("wb") as file:
        for _ in range(_SYNCS):
            began = time.perf_counter()
            file.write(b"x" * 64)
            file.flush()
            os.fsync(file.fileno())
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def _renames(folder: Path) -> bool:
    """Return whether a file takes the place of another by its name, as checkpoints become complete."""
    old, new = folder / "old", folder / "new"
    old.write_bytes(b"old")
    new.write_bytes(b"new")
    new.replace(old)
    return old.read_bytes() == b"new" and not new.exists()


def _locks(folder: Path) -> bool:
    """Return whether a lock keeps a second holder out."""
    with locked(folder / "lock") as first, locked(folder / "lock") as second:
        return first and not second


@contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Hold the lock of a file while the block runs, and yield whether it could be had at once."""
    opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # another's, or a file system without locks
            yield False
        else:
            yield True
    finally:
        os.close(opened)
