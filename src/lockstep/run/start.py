"""N ranks of a function: in this process, in processes that it starts, or as one rank that a launcher started."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from functools import partial
from pathlib import Path
from typing import Final, Literal, TypeVar

import torch

from lockstep.config.placement import Placement, rendezvous_in
from lockstep.core.rank import RankInfo
from lockstep.errors import LockstepError
from lockstep.ranks.external import alone, as_rank, refuse
from lockstep.ranks.local_launcher import run_workers
from lockstep.ranks.rendezvous import Rendezvous
from lockstep.run.strategy import find_strategy
from lockstep.strategies.base import Foreign

T = TypeVar("T")
_SIGNALLED: Final = 128  # exit codes above it are of signals, as shells count
Work = Callable[[Rendezvous], int]  # returns the exit code


def as_launched(info: RankInfo, words: Sequence[str], opened: Callable[[], tuple[Placement, Work]]) -> int:
    """Meet the ranks that the launcher started and do the work that `opened` returns; return its exit code.

    `opened` checks what can be checked before the ranks meet. What it finds ends this rank, and is reported once: to
    the others too, if they come soon to the rendezvous place that `words`, dotted overrides, name.
    """
    try:
        placement, work = opened()
    except LockstepError as error:
        refuse(info, rendezvous_in(words), error)
    return as_rank(info, placement.rendezvous, placement.timeout_s, placement.lost_after_s, work)


def on_ranks(
    work: Callable[[T | None, Rendezvous], int],
    ready: T,
    placement: Placement,
    count: int,
    logs: Path | None = None,
    failed: Callable[[str], None] | None = None,
    *,
    apart: bool = False,
) -> int:
    """Do `work(ready, rendezvous)` on `count` ranks of this machine and return the exit code.

    One rank is this process, unless `apart`; several, of which ranks/local_launcher.py has the rest, are processes of
    their own. What is `ready` in this process is so in forked ones. To a spawned one, where there is CUDA, it cannot be
    sent, and it gets None.
    """
    if count == 1 and not apart:
        return work(ready, alone())
    torch.set_num_threads(1)  # forked workers must not inherit a pool of threads
    # CUDA does not survive a fork, which is quicker and shares what is in memory.
    method: Literal["fork", "spawn"] = "spawn" if placement.device != "cpu" and torch.cuda.device_count() else "fork"
    _, strategy = find_strategy(placement, count)
    if method == "fork" and isinstance(strategy, Foreign):
        strategy.preload()
    worker = partial(work, ready if method == "fork" else None)
    return run_workers(worker, count, method, placement.timeout_s, logs, failed)


def in_workers_silently(
    work: Callable[[T | None, Rendezvous], int], ready: T, placement: Placement, count: int
) -> tuple[int, str]:
    """Do `work` on ranks that are all processes of their own; return the exit code, and the message of a failure.

    A signal that ended the workers ends this process, too.
    """
    with redirect_stderr(io.StringIO()) as printed:
        try:
            code = on_ranks(work, ready, placement, count, apart=True)
        except SystemExit as end:  # a signal came before there were workers
            code = int(end.code or 0)
    if code > _SIGNALLED:
        raise SystemExit(code)
    return code, printed.getvalue().strip()
