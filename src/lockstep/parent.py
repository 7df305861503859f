"""A child process and its parent: that it does not outlive it, and what it is."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def die_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends, even by SIGKILL (Linux)."""
    known = multiprocessing.parent_process()  # from before the fork, where Python made this process
    parent = known.pid if known else os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def parent_command() -> list[str]:
    """Return the command line of the process that started this one; empty where there is no telling."""
    try:
        words = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    except OSError:  # no Linux, or not ours to see
        return []
    return os.fsdecode(words).split("\0")[:-1]
