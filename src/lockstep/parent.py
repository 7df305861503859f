"""A child process and its parent: that it does not outlive it, and what it is."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import select
import signal
from typing import Final

from lockstep.errors import TrainingError

_PR_SET_PDEATHSIG: Final = 1
_TIED: Final = ("torchrun", "openmpi", "mpich")  # one started by hand may outlive its shell, as with nohup


def die_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends, even by SIGKILL (Linux)."""
    known = multiprocessing.parent_process()  # from before the fork, where Python made this process
    parent = known.pid if known else os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def die_with_launcher(launcher: str) -> None:
    """Let this process end with the launcher that started it; where that is gone already, raise TrainingError.

    It is the first thing to do: only then is it the launcher that is the parent.
    """
    if launcher not in _TIED:
        return
    die_with_parent()
    if os.getppid() == 1 and _left_behind(launcher):
        raise TrainingError(f"the launcher that started this process ({launcher}) is gone")


def parent_command() -> list[str]:
    """Return the command line of the process that started this one; empty where there is no telling."""
    import psutil  # only now: `lockstep --help` need not wait for it

    try:
        return psutil.Process(os.getppid()).cmdline()
    except psutil.Error:  # gone, or not ours to see
        return []


def _left_behind(launcher: str) -> bool:
    """Return whether process 1 is the parent of this one because it takes the children of those that are gone.

    In a container torchrun itself may be process 1; under MPI a container for each rank may have an init of its own.
    """
    if launcher == "torchrun":
        return not any("python" in word for word in parent_command()[:1])
    return _nobody_reads(1)


def _nobody_reads(descriptor: int) -> bool:
    """Return whether what is written there, as by a rank for its mpirun, is lost."""
    poll = select.poll()
    poll.register(descriptor, 0)
    return bool(poll.poll(0))  # an error or a hang-up: nothing else was asked for
