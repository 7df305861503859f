"""The place of run folders: whether it can be written, has room, and locks as runs need it."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from lockstep.common import plainfile


def folder_facts(folder: Path) -> dict[str, Any]:
    """Return the room there is at `folder`, and whether locks hold; `problem` where nothing can be written.

    It writes into a folder of its own beside what is there, and removes it.
    """
    place = existing(folder)
    found = {"folder": str(folder), "free": psutil.disk_usage(str(place)).free, "locks": False, "problem": ""}
    try:
        with tempfile.TemporaryDirectory(prefix=".lockstep-doctor-", dir=place) as own:
            lock = Path(own) / "lock"
            with try_lock(lock) as first, try_lock(lock) as second:
                return found | {"locks": first and not second}
    except OSError as error:
        return found | {"problem": error.strerror or str(error)}


def existing(folder: Path) -> Path:
    """Return the folder, or the nearest one around it that is there."""
    absolute = folder.absolute()
    return next(each for each in (absolute, *absolute.parents) if each.is_dir())


@contextmanager
def try_lock(path: Path) -> Iterator[bool]:
    """Hold the lock of a file while the block runs, and yield whether it could be had at once."""
    opened = plainfile.descriptor(path, os.O_RDWR | os.O_CREAT)
    try:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # another's, or a file system without locks
            yield False
        else:
            yield True
    finally:
        os.close(opened)
