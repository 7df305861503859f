"""Starts processes on this machine that run a user's script with `lockstep.join`."""

import os
import runpy
import sys
from collections.abc import Sequence
from functools import partial
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from typing import Any, Final

from lockstep.config.placement import Placement
from lockstep.errors import EXIT_DONE, UsageError
from lockstep.loop.model import explain_errors
from lockstep.ranks.failure import Failure
from lockstep.ranks.rendezvous import Rendezvous
from lockstep.run.start import run_on_ranks
from lockstep.runs.folder import write_exit
from lockstep.runs.worker_context import WORKER_CONTEXT, WorkerContext

_MAX_PATH_BYTES: Final = 4096  # PATH_MAX of Linux


def start_script(path: str, arguments: Sequence[str], num_processes: int) -> int:
    """Run a script in `num_processes` processes on this machine and return the exit code."""
    if not Path(path).is_file():
        raise UsageError(f"{path}: file not found; pass a script that calls lockstep.join")
    failures: list[Failure] = []
    # The folder of the last run that the script opened. There is no lock, because a process could die while holding it.
    claimed_folder = RawArray("c", _MAX_PATH_BYTES)
    work = partial(_run_worker, path, [path, *arguments], claimed_folder)
    code = run_on_ranks(work, None, Placement(), num_processes, on_failure=failures.append, in_subprocess=True)
    if failures and claimed_folder.value:  # the failed script couldn't write the end status of its run
        write_exit(Path(os.fsdecode(claimed_folder.value)), code, failures[-1])
    return code


def run_script(path: str, argv: Sequence[str]) -> None:
    """Run a script in this process as `__main__`, with the arguments `argv`."""
    sys.argv = list(argv)
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    runpy.run_path(path, run_name="__main__")


def _run_worker(
    script_path: str, argv: Sequence[str], shared_folder_path: Any, _ready: None, rendezvous: Rendezvous
) -> int:
    def claim(folder: Path) -> None:
        shared_folder_path.value = os.fsencode(folder.absolute())

    context = WorkerContext(rendezvous, on_claim=claim)
    WORKER_CONTEXT.set(context)
    code = EXIT_DONE
    try:
        with explain_errors(context.runs):
            run_script(script_path, argv)
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        code = end.code or EXIT_DONE
    for run in context.runs:
        run.close()
    return code
