"""One run in a folder: a lock that the kernel drops with the process that took it."""

import fcntl
import os
import socket
import time
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Final, final

from lockstep.common import plainfile
from lockstep.errors import UsageError

LOCK: Final = "lock"
_TRIES: Final = 3
_PAUSE_S: Final = 0.05


@final
class Lock(AbstractContextManager["Lock"]):
    """A held lock; `release()`, the end of a `with` block or the end of the process frees it.

    The holder is the process that called `lock`, and only that one. flock belongs to the open file, which a
    forked child shares, so a loader worker that outlives a killed parent would keep the run folder locked:
    each forked child therefore closes its copy at once. (Closing a copy frees nothing as long as the holder's
    is open, where LOCK_UN in the child would unlock the parent.) Programs started by exec never get the
    descriptor: Python opens files close-on-exec.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        os.register_at_fork(after_in_child=self.release)

    def release(self) -> None:
        """Close this process's descriptor of the lock file; the second time does nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __exit__(self, *_: object) -> None:
        self.release()


def lock(run_dir: Path) -> Lock:
    """Lock a run folder, made if missing, for this process; a folder in use raises UsageError.

    One process of a run takes it: the one that outlives or ends all others. The file stays after release:
    removing it would let two processes hold locks on two files of the same name.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    descriptor = plainfile.descriptor(run_dir / LOCK, os.O_RDWR | os.O_CREAT)
    try:
        _take(descriptor, run_dir)
    except BaseException:
        os.close(descriptor)
        raise
    return Lock(descriptor)


def _take(descriptor: int, run_dir: Path) -> None:
    try:
        _ask(descriptor)
    except BlockingIOError:
        holder = os.pread(descriptor, 400, 0).decode(errors="replace").strip() or "another process"
        raise UsageError(f"{run_dir}: in use by {holder}; wait for it or choose another run.dir") from None
    except OSError as error:
        raise UsageError(
            f"{run_dir}: this file system cannot lock files ({error.strerror}), so a second run here would "
            "go unnoticed; choose a run.dir on another one"
        ) from error
    if not os.fstat(descriptor).st_nlink:  # a start that was refused had made the folder, and removed it
        raise UsageError(f"{run_dir}: was removed by another start that was refused; start again")
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on host {socket.gethostname()}\n".encode(), 0)


def _ask(descriptor: int) -> None:
    """Take the lock or raise BlockingIOError: not at once, since who looks whether a run is at work has it a moment."""
    for _ in range(_TRIES - 1):
        with suppress(BlockingIOError):
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(_PAUSE_S)
    return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
