"""A script of the user's own, which joins a run, in processes that Lockstep starts."""

import os
import runpy
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from lockstep.config.placement import Placement
from lockstep.errors import EXIT_DONE, UsageError
from lockstep.ranks.rendezvous import Rendezvous
from lockstep.run.start import on_ranks
from lockstep.run.worker_context import WORKER_CONTEXT, WorkerContext


def start_script(path: str, arguments: Sequence[str], count: int) -> int:
    """Run a script in `count` processes of this machine and return the exit code."""
    if not Path(path).is_file():
        raise UsageError(f"{path}: no such file; name a script that calls lockstep.join")
    return on_ranks(partial(_work, path, [path, *arguments]), None, Placement(), count, in_subprocess=True)


def run_script(path: str, argv: Sequence[str]) -> None:
    """Run a script in this process as Python does."""
    sys.argv = list(argv)
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    runpy.run_path(path, run_name="__main__")


def _work(path: str, argv: Sequence[str], _ready: None, rendezvous: Rendezvous) -> int:
    context = WorkerContext(rendezvous)
    WORKER_CONTEXT.set(context)
    code = EXIT_DONE
    try:
        run_script(path, argv)
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        code = end.code or EXIT_DONE
    for run in context.runs:
        run.close()
    return code
