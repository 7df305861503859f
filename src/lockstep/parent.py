"""A child process and its parent: that it does not outlive it, and what it is."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Final

from lockstep.errors import TrainingError

_PR_SET_PDEATHSIG: Final = 1
_TIED: Final = ("torchrun", "openmpi", "hydra")  # one started by hand may outlive its shell, as with nohup


def die_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends, even by SIGKILL (Linux)."""
    known = multiprocessing.parent_process()  # from before the fork, where Python made this process
    parent = known.pid if known else os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def die_with_launcher(launcher: str) -> None:
    """Let this process end with the launcher that started it; the first thing to do. Raise where that is gone already.

    It is known only of torchrun that it is gone: under MPI a container for each rank may have an init of its own.
    """
    if launcher not in _TIED:
        return
    die_with_parent()
    # Process 1 takes the children of those that are gone. In a container torchrun itself may be it.
    if launcher == "torchrun" and os.getppid() == 1 and not any("python" in word for word in parent_command()[:1]):
        raise TrainingError("torchrun, which started this process, is gone")


def parent_command() -> list[str]:
    """Return the command line of the process that started this one; empty where there is no telling."""
    try:
        words = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    except OSError:  # no Linux, or not ours to see
        return []
    return os.fsdecode(words).split("\0")[:-1]
