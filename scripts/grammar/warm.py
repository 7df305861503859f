"""Programs in processes that are forked from this one, which has imported what they import: a start takes 0.1 s.

The process that forks must have no threads. Each program runs as `lockstep launch` runs a script, in a session of its
own, and is killed after a while.
"""

import ctypes
import gc
import importlib
import os
import select
import signal
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

import torch

from lockstep.device.precision import select_deterministic_kernels
from lockstep.loop.script import start_script
from lockstep.run.start import preload_modules

TIMEOUT_S: Final = 60.0
_PR_SET_PDEATHSIG: Final = 1
_IMPORTED: Final = """
import sys, torch
from pathlib import Path
exec(compile(Path({program!r}).read_text(), {program!r}, "exec"))
Path({names!r}).write_text("\\n".join(sys.modules))
"""


@dataclass(frozen=True)
class Ended:
    """How a program ended: its exit code, -N after signal N, or None if it was killed for taking too long."""

    code: int | None
    out: str
    err: str


def warm_up(program: Path, folder: Path) -> None:
    """Import what Lockstep imports while it trains `program`, and run nothing else in this process."""
    torch.set_num_threads(1)
    select_deterministic_kernels(num_threads=1)
    preload_modules()
    names = folder / "modules"
    script = folder / "warm.py"
    script.write_text(_IMPORTED.format(program=str(program), names=str(names)), encoding="utf-8")
    for strategy, processes in (("single", 1), ("zero3", 2)):
        start(script, [strategy, "--dir", str(folder / strategy)], processes, folder)
        for name in names.read_text(encoding="utf-8").splitlines():
            if name not in sys.modules and name != "__main__":
                importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a forked process need not look through what is imported, nor copy its pages


def start(program: Path, arguments: Sequence[str], processes: int, folder: Path, timeout_s: float = TIMEOUT_S) -> Ended:
    """Run a program on so many processes in `folder`, and wait for its end."""
    streams = [folder / "out.txt", folder / "err.txt"]
    pid = os.fork()
    if not pid:
        _be_launcher(program, arguments, processes, folder, streams)
    code = _wait(pid, timeout_s)
    out, err = (path.read_text(encoding="utf-8", errors="replace") for path in streams)
    return Ended(code, out, err)


def _wait(pid: int, timeout_s: float) -> int | None:
    """Return the exit code of a child; None after it had to be killed."""
    descriptor = os.pidfd_open(pid)
    try:
        in_time = bool(select.select([descriptor], [], [], timeout_s)[0])
        if not in_time:
            os.kill(pid, signal.SIGKILL)  # its ranks follow
        _, status = os.waitpid(pid, 0)
        return os.waitstatus_to_exitcode(status) if in_time else None
    finally:
        os.close(descriptor)


def _be_launcher(
    program: Path, arguments: Sequence[str], processes: int, folder: Path, streams: Sequence[Path]
) -> NoReturn:
    """Be the process that starts the ranks of a program."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setsid()
        os.chdir(folder)
        for number, path in enumerate(streams, start=1):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(descriptor, number)
            os.close(descriptor)
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False, buffering=1)  # noqa: SIM115
        code = start_script(str(program), arguments, processes)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
