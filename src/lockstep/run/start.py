"""Runs a function on the ranks of a run: in this process, in new processes, or on a rank started by a launcher."""

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
from lockstep.common.hashing import FIXED_SEED, RANDOM_SEED, get_hash_seed, set_hash_seed_for_children
from lockstep.common.rank import RankInfo
from lockstep.config.placement import Placement, find_rendezvous_address
from lockstep.errors import LockstepError
from lockstep.ranks.external import exit_before_join, join_job, make_single_process_rendezvous
from lockstep.ranks.failure import Failure
from lockstep.ranks.local_launcher import run_workers
from lockstep.ranks.rendezvous import Rendezvous
from lockstep.setup.strategy import find_strategy
from lockstep.strategies.base import ExternalEngineStrategy

T = TypeVar("T")
SIGNAL_BASE: Final = 128  # larger exit codes represent signals, as in a shell
RankFunction = Callable[[Rendezvous], int]  # returns the exit code


def run_launched_rank(
    info: RankInfo, override_words: Sequence[str], prepare: Callable[[], tuple[Placement, RankFunction]]
) -> int:
    """Join the ranks that the launcher started, run the function that `prepare` returns, and return its exit code.

    `prepare` runs all checks that are possible before the ranks join, and returns the placement and the function. If
    `prepare` raises a LockstepError, this rank exits. If other ranks soon join the rendezvous that is set in
    `override_words`, the error is reported to them, so that it is printed only once.
    """
    try:
        placement, work = prepare()
    except LockstepError as error:
        exit_before_join(info, find_rendezvous_address(override_words), error)
    with join_job(info, placement.rendezvous, placement.timeout_s, placement.lost_after_s) as rendezvous:
        return work(rendezvous)


def run_on_ranks(
    function: Callable[[T | None, Rendezvous], int],
    shared: T,
    placement: Placement,
    num_processes: int,
    log_folder: Path | None = None,
    on_failure: Callable[[Failure], None] | None = None,
    *,
    in_subprocess: bool = False,
    child_hash_seed: str | None = None,
    forks: bool = True,
) -> int:
    """Run `function(shared, rendezvous)` on `num_processes` ranks on this machine, and return the exit code.

    A single rank runs in this process, unless `in_subprocess` is set. Several ranks run in separate processes
    (ranks/local_launcher.py). On the CPU, they are forked and share `shared`. If CUDA may be used, they are spawned,
    and `function` gets None instead of `shared`, because `shared` can't be pickled.

    - `log_folder`: The folder for the logs of the ranks.
    - `on_failure`: Called with the failure that ended the ranks, if any.
    - `child_hash_seed`: A value for PYTHONHASHSEED. If it is set, the processes are spawned with this hash seed.
    - `forks`: If False, processes are spawned, because this process has threads that don't work after a fork.
    """
    if num_processes == 1 and not in_subprocess:
        return function(shared, make_single_process_rendezvous())
    torch.set_num_threads(1)  # forked workers must not inherit a thread pool
    # Forking is faster and shares memory, but CUDA doesn't work after a fork.
    may_use_cuda = placement.device != "cpu" and torch.cuda.device_count()
    spawns = not forks or child_hash_seed is not None or may_use_cuda
    method: Literal["fork", "spawn"] = "spawn" if spawns else "fork"
    _, strategy = find_strategy(placement, num_processes)
    if method == "fork" and isinstance(strategy, ExternalEngineStrategy):
        strategy.preload()
    worker = partial(function, shared if method == "fork" else None)
    with ExitStack() as stack:
        if method == "spawn":  # otherwise, each process would choose a different hash seed
            stack.enter_context(
                set_hash_seed_for_children(
                    child_hash_seed or (FIXED_SEED if get_hash_seed() == RANDOM_SEED else get_hash_seed())
                )
            )
        if child_hash_seed is not None:
            stack.enter_context(_hide_main())
        return run_workers(worker, num_processes, method, placement.timeout_s, log_folder, on_failure)


def can_be_spawned(function: Callable[..., object]) -> bool:
    """Return whether a function can be pickled for a spawned process. It must not be defined in the script itself."""
    with _hide_main():
        try:
            ForkingPickler.dumps(function)
        except Exception:  # pickling a user's object can raise any exception
            return False
    return True


@contextmanager
def _hide_main() -> Iterator[None]:
    """Hide the main script of this process while processes are spawned, because they would otherwise run it again."""
    script = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script


def preload_modules() -> None:
    """Import all modules of comm and device before processes are forked, so that the processes share the modules.

    For example, importing FSDP takes half a second per process.
    """
    for package in (comm, device):
        for module in pkgutil.iter_modules(package.__path__):
            import_module(f"{package.__name__}.{module.name}")


def run_in_workers(
    function: Callable[[T | None, Rendezvous], int],
    shared: T,
    placement: Placement,
    num_processes: int,
    child_hash_seed: str | None = None,
) -> tuple[int, str]:
    """Call `function` on ranks in separate processes, and return the exit code and the error message.

    Errors aren't printed. For `child_hash_seed`, see `run_on_ranks`. If a signal ended the workers, this process exits
    too.
    """
    with redirect_stderr(io.StringIO()) as printed:
        try:
            code = run_on_ranks(
                function, shared, placement, num_processes, in_subprocess=True, child_hash_seed=child_hash_seed
            )
        except SystemExit as end:  # a signal arrived before the workers were started
            code = int(end.code or 0)
    if code > SIGNAL_BASE:
        raise SystemExit(code)
    return code, printed.getvalue().strip()
