"""One process of a node at a time: a lock on a file, released by the kernel when its holder dies."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold the lock file `path`, made if missing, while the block runs; wait while another process holds it.

    The lock is the open file's, not the file's existence: a killed process leaves nothing to clear away. The
    file stays, because removing it would let a waiting and a new process hold two locks of one name.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)
