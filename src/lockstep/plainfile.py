"""Opens plain files only, which have an end; in folders that others may have written to, never through a link."""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path


def descriptor(path: Path, flags: int = os.O_RDONLY, mode: int = 0o666, *, links: bool = False) -> int:
    """Open `path` as os.open does; OSError where it is no regular file, or, without `links`, its last part is a link.

    A link may lead to any file of the user's, a pipe keeps its reader waiting, and a device may never end.
    """
    try:
        follow = 0 if links else os.O_NOFOLLOW
        opened = os.open(path, flags | follow | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno == errno.ELOOP and not links:
            raise OSError(errno.ELOOP, "it is a symbolic link, where a file is expected", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return opened


def reader(path: Path, *, links: bool = False) -> BufferedReader:
    """Open `path` to read its bytes; see `descriptor`."""
    return os.fdopen(descriptor(path, links=links), "rb")


def content(path: Path, limit: int) -> bytes:
    """Return the bytes of a file of at most `limit`; OSError where it is larger; see `descriptor`."""
    with reader(path) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"it is larger than {limit:,} bytes", str(path))
    return data
