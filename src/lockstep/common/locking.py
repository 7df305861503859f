"""One process of a node at a time: a lock on a file, released by the kernel when its holder dies."""

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
    """Hold the lock file `path`, made if missing, while the block runs; wait while another process holds it.

    Without `wait` it is tried once, and what is yielded says whether it could be had.

    The lock is the open file's, not the file's existence: a killed process leaves nothing to clear away. The
    file stays, because removing it would let a waiting and a new process hold two locks of one name.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    opened = plainfile.descriptor(path, os.O_RDWR | os.O_CREAT)
    try:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            held = True
        except OSError:  # another's, or a file system without locks
            if wait:
                raise
            held = False
        yield held
    finally:
        os.close(opened)


def private_folder() -> Path:
    """Return a folder of this user's alone in the node's folder for temporary files, made if missing.

    Everybody may write there, and knows the name: what another user has put in its place is refused.
    """
    folder = Path(tempfile.gettempdir()) / f"lockstep-{os.getuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise UsageError(
            f"{folder}: must be a folder that only you can use (mode 0700), for locks between your processes; "
            f"remove it, or set TMPDIR to a folder of your own"
        )
    return folder
