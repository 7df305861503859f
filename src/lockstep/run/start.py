"""N ranks of a function: in this process, in processes that it starts, or as one rank that a launcher started."""

import io
import pkgutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from functools import partial
from importlib import import_module
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import ModuleType
from typing import Final, Literal, TypeVar

import torch

from lockstep import comm, device
from lockstep.common.hashing import FIXED, RANDOM, hash_seed, hash_seed_for_children
from lockstep.common.rank import RankInfo
from lockstep.config.placement import Placement, rendezvous_in
from lockstep.errors import LockstepError
from lockstep.ranks.external import alone, membership, refuse
from lockstep.ranks.failure import Failure
from lockstep.ranks.local_launcher import run_workers
from lockstep.ranks.rendezvous import Rendezvous
from lockstep.setup.strategy import find_strategy
from lockstep.strategies.base import ExternalEngine

T = TypeVar("T")
_SIGNALLED: Final = 128  # exit codes above it are of signals, as shells count
Work = Callable[[Rendezvous], int]  # returns the exit code


def as_launched(info: RankInfo, words: Sequence[str], check: Callable[[], tuple[Placement, Work]]) -> int:
    """Meet the ranks that the launcher started and do the work that `check` returns; return its exit code.

    `check` checks what can be checked before the ranks join. What it finds ends this rank, and is reported once: to
    the others too, if they come soon to the rendezvous place that `words`, dotted overrides, name.
    """
    try:
        placement, work = check()
    except LockstepError as error:
        refuse(info, rendezvous_in(words), error)
    with membership(info, placement.rendezvous, placement.timeout_s, placement.lost_after_s) as rendezvous:
        return work(rendezvous)


def on_ranks(
    work: Callable[[T | None, Rendezvous], int],
    ready: T,
    placement: Placement,
    count: int,
    logs: Path | None = None,
    failed: Callable[[Failure], None] | None = None,
    *,
    in_subprocess: bool = False,
    hashes: str | None = None,
) -> int:
    """Do `work(ready, rendezvous)` on `count` ranks of this machine and return the exit code.

    One rank is this process, unless `in_subprocess`; several are separate processes (ranks/local_launcher.py). Forked
    ones share `ready`, whatever it holds; it cannot be sent to a spawned one, where there is CUDA, which gets None.
    With `hashes`, a seed of Python's hashes, they are spawned, and have it.
    """
    if count == 1 and not in_subprocess:
        return work(ready, alone())
    torch.set_num_threads(1)  # forked workers must not inherit a pool of threads
    # CUDA does not survive a fork, which is quicker and shares what is in memory.
    spawns = hashes is not None or (placement.device != "cpu" and torch.cuda.device_count())
    method: Literal["fork", "spawn"] = "spawn" if spawns else "fork"
    _, strategy = find_strategy(placement, count)
    if method == "fork" and isinstance(strategy, ExternalEngine):
        strategy.preload()
    worker = partial(work, ready if method == "fork" else None)
    with ExitStack() as stack:
        if method == "spawn":  # each would draw a seed of its own
            stack.enter_context(hash_seed_for_children(hashes or (FIXED if hash_seed() == RANDOM else hash_seed())))
        if hashes is not None:
            stack.enter_context(_without_main())
        return run_workers(worker, count, method, placement.timeout_s, logs, failed)


def can_be_spawned(work: Callable[..., object]) -> bool:
    """Return whether a function can be sent to a new process: it is in a module, which is not the script itself."""
    with _without_main():
        try:
            ForkingPickler.dumps(work)
        except Exception:  # whatever its parts raise
            return False
    return True


@contextmanager
def _without_main() -> Iterator[None]:
    """Hide the script of this process from those that are spawned in the block: they would run it first."""
    script = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script


def import_for_all() -> None:
    """Import here, once, what strategies import when they start: FSDP alone takes each process half a second."""
    for room in (comm, device):
        for module in pkgutil.iter_modules(room.__path__):
            import_module(f"{room.__name__}.{module.name}")


def in_workers_silently(
    work: Callable[[T | None, Rendezvous], int], ready: T, placement: Placement, count: int, hashes: str | None = None
) -> tuple[int, str]:
    """Do `work` on ranks that are all processes of their own; return the exit code, and the message of a failure.

    `hashes` as in `on_ranks`. A signal that ended the workers ends this process, too.
    """
    with redirect_stderr(io.StringIO()) as printed:
        try:
            code = on_ranks(work, ready, placement, count, in_subprocess=True, hashes=hashes)
        except SystemExit as end:  # a signal came before there were workers
            code = int(end.code or 0)
    if code > _SIGNALLED:
        raise SystemExit(code)
    return code, printed.getvalue().strip()
