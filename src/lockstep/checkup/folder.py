"""The place of run folders: whether it can be written, has room, and locks as runs need it."""

import tempfile
from pathlib import Path
from typing import Any

import psutil

from lockstep.common.locking import exclusive


def folder_facts(folder: Path) -> dict[str, Any]:
    """Return the room there is at `folder`, and whether locks hold; `problem` where nothing can be written.

    It writes into a folder of its own beside what is there, and removes it.
    """
    place = existing(folder)
    found = {"folder": str(folder), "free": psutil.disk_usage(str(place)).free, "locks": False, "problem": ""}
    try:
        with tempfile.TemporaryDirectory(prefix=".lockstep-doctor-", dir=place) as own:
            lock = Path(own) / "lock"
            with exclusive(lock, wait=False) as first, exclusive(lock, wait=False) as second:
                return found | {"locks": first and not second}
    except OSError as error:
        return found | {"problem": error.strerror or str(error)}


def existing(folder: Path) -> Path:
    """Return the folder, or the nearest one around it that is there."""
    absolute = folder.absolute()
    return next(each for each in (absolute, *absolute.parents) if each.is_dir())
