"""Which tests run at the same time: those that are `alone` wait until no other runs, and the others wait for them."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def admitted(folder: Path, *, alone: bool) -> Iterator[None]:
    """Wait until a test may run, and keep others from running for as long as it does if it has to be alone.

    These are locks of the kernel, which end with their process. Whoever waits holds the gate, so that those who come
    later wait behind: else a test that has to be alone would wait for ever.
    """
    with (folder / "gate").open("a") as gate, (folder / "running").open("a") as running:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(running, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(running, fcntl.LOCK_UN)  # closing is not enough: what the test has forked may have it open too
