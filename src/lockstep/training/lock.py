"""A lock that lets only one process write to a run folder. The kernel releases the lock when the process ends."""

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
    """A held lock. Call `release()` or leave the `with` block to release it. It is also released when the process ends.

    Only the process that called `lock` holds it. A flock belongs to the open file description, which a forked child
    shares. A loader worker that outlives a killed parent would therefore keep the run folder locked. To prevent this,
    each forked child closes its copy of the descriptor immediately. Closing the copy doesn't release the lock while the
    holder's descriptor is open, unlike LOCK_UN. Programs started by exec don't inherit the descriptor, because Python
    opens files close-on-exec.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        os.register_at_fork(after_in_child=self.release)

    def release(self) -> None:
        """Close the descriptor of the lock file in this process. Calling it again is a no-op."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __exit__(self, *_: object) -> None:
        self.release()


def lock(run_dir: Path, advice: str = "wait for it, or choose a different run.dir") -> Lock:
    """Lock a run folder for this process. Create the folder if needed.

    Raises UsageError, whose message ends with `advice`, if the folder is in use.

    Exactly one process of a run must call this function, and it must be the last process to end. Releasing the
    lock doesn't remove the lock file. If it did, two processes could hold locks on two files with the same name.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    descriptor = plainfile.open_descriptor(run_dir / LOCK, os.O_RDWR | os.O_CREAT)
    try:
        _acquire_for_run(descriptor, run_dir, advice)
    except BaseException:
        os.close(descriptor)
        raise
    return Lock(descriptor)


def _acquire_for_run(descriptor: int, run_dir: Path, advice: str) -> None:
    try:
        _acquire(descriptor)
    except BlockingIOError:
        holder = os.pread(descriptor, 400, 0).decode(errors="replace").strip() or "another process"
        raise UsageError(f"{run_dir}: in use by {holder}; {advice}") from None
    except OSError as error:
        raise UsageError(
            f"{run_dir}: this file system cannot lock files ({error.strerror}), so a second run in this folder would "
            "not be detected; choose a run.dir on a different file system"
        ) from error
    # Another process created the folder, failed to start the run, and removed the folder.
    if not os.fstat(descriptor).st_nlink:
        raise UsageError(f"{run_dir}: another run that failed to start removed the folder; start again")
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on host {socket.gethostname()}\n".encode(), 0)


def _acquire(descriptor: int) -> None:
    """Take the lock, or raise BlockingIOError if it is held by a different process.

    A process that lists active runs also holds the lock briefly, so this function tries several times.
    """
    for _ in range(_TRIES - 1):
        with suppress(BlockingIOError):
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(_PAUSE_S)
    return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
