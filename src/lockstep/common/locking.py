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
def exclusive(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold the lock file `path` in the block. Creates the file if needed. Waits while another process holds it.

    If `wait` is False, try to acquire the lock once without waiting, and yield whether this succeeded.

    The lock is held by an open file descriptor, so a killed process releases its lock.
    The file is never removed. Otherwise, a waiting process and a new process could hold two locks with the same name.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = plainfile.descriptor(path, os.O_RDWR | os.O_CREAT)
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


def private_folder() -> Path:
    """Return this user's private folder in the temporary folder of the node. Creates it if needed.

    All users can write to the temporary folder, and can guess the name of the private folder. Therefore, this raises
    UsageError if another user created the private folder, or if other users can access the private folder.
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
