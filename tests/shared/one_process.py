"""A run in this process, as a function joins it that Lockstep started: hooks of the interpreter are left alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

import lockstep
from lockstep.ranks.external import make_single_process_rendezvous
from lockstep.runs.worker_context import WORKER_CONTEXT, WorkerContext


@contextmanager
def joined(**options: Any) -> Iterator[Any]:
    """Join a run, and close it however the block ends; torch's settings are those from before, afterwards."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    token = WORKER_CONTEXT.set(WorkerContext(make_single_process_rendezvous()))
    try:
        run = lockstep.join(seed=0, **options)
        try:
            yield run
            run.close()
        except BaseException as error:
            run.close(error)
            raise
    finally:
        WORKER_CONTEXT.reset(token)
        torch.use_deterministic_algorithms(deterministic)
