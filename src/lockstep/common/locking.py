"""File locks between the processes of a node. The kernel releases a lock when its holder ends."""

import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lockstep.common import plainfile
from lockstep.errors import UsageError


@contextmanager
def lock_file(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Return a context manager that holds a file lock. It waits while another process holds the lock, and yields True.

    If `path` doesn't exist, it is created. If `wait` is False, the context manager doesn't wait, and yields whether the
    lock was acquired.

    An open file descriptor holds the lock, so a killed process releases it. The file is never removed. If it were, a
    waiting process and a new process could both hold the lock, on two files with the same path.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = plainfile.open_descriptor(path, os.O_RDWR | os.O_CREAT)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            acquired = True
        except OSError:  # another process holds the lock, or the file system doesn't support locks
            if wait:
                raise
            acquired = False
        yield acquired
    finally:
        os.close(descriptor)


def get_private_folder() -> Path:
    """Return this user's private folder in the temporary folder of the node. Creates it if needed.

    Any user can create a folder with this name in the temporary folder. Therefore, this raises UsageError if another
    user owns the private folder, or if other users can access it.
    """
    folder = Path(tempfile.gettempdir()) / f"lockstep-{os.getuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise UsageError(
            f"{folder}: must be a folder that only you can access (mode 0700), because it contains locks; remove it, "
            f"or set TMPDIR to a different folder"
        )
    return folder
