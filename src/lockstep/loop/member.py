"""The lifetime of a rank in a custom training loop: how it joins the other ranks, where it writes, and how it ends."""

import atexit
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NoReturn, TextIO, TypeVar

from lockstep.common import hashing
from lockstep.common.rank import RankInfo
from lockstep.common.user_source import script_digests, source_digests
from lockstep.config.placement import Placement
from lockstep.config.run import RunConfig as Kept
from lockstep.core import random
from lockstep.core.engine_recipe import PlainRecipe
from lockstep.data.items import seed_generators
from lockstep.device import machine
from lockstep.errors import EXIT_INTERRUPTED, TrainingError, UsageError
from lockstep.launchers import detect_rank, ray, slurm
from lockstep.loop.replaying import Replaying, replaying
from lockstep.loop.settings import Settings
from lockstep.ranks.external import alone, join_ranks, membership, refuse
from lockstep.ranks.failure import failure_of
from lockstep.ranks.open_group import rank_in_open_group
from lockstep.ranks.rank_log import log_name
from lockstep.ranks.rendezvous import Rendezvous
from lockstep.ranks.signals import EXIT_CODES, Reason
from lockstep.reporting.console import Console
from lockstep.reporting.ray import RayReport
from lockstep.reporting.sink import Sink
from lockstep.run.rank import Rank
from lockstep.run.session import open_rank
from lockstep.run.sinks import check_sinks, open_sinks, own_paths
from lockstep.runs import folder as run_folder
from lockstep.runs.worker_context import WORKER_CONTEXT, Observe, OpenRun
from lockstep.training.checkpoint.signing import signing_key

R = TypeVar("R", bound=OpenRun)
Hook = Callable[[type[BaseException], BaseException, TracebackType | None], None]

# The open runs of this process. In a notebook, an error doesn't end the process, and it keeps the loop alive.
_OPEN: Final[list[OpenRun]] = []


@dataclass(frozen=True, eq=False)
class Member:
    """The state of a rank after `join`. `checkpoint` is the checkpoint that the run resumes from."""

    settings: Settings
    rendezvous: Rendezvous
    rank: Rank
    checkpoint: Path | None
    held: ExitStack
    strategy: str | dict[str, Any] | None = None
    observe: Observe | None = None
    guarded: bool = True
    replay: Replaying | None = None  # set if this is a replay
    of_ray: bool = False  # a worker of Ray Train, where Ray handles the process and its errors

    @staticmethod
    def join(read: Callable[[], Settings]) -> "Member":
        """Join the other ranks and set up this one.

        An error ends this process. If the rank is alone or a worker of Ray Train, the error is raised instead.
        """
        context, held = WORKER_CONTEXT.get(), ExitStack()
        worker = ray.worker() if context is None else None
        info = (detect_rank() or rank_in_open_group()) if context is None and worker is None else None
        if context is None and worker is None and not _interactive():
            sys.excepthook = _report  # `register` replaces it, once there is a run
        settings = _read(read, info)
        placement, kept = settings.placement, settings.run
        again = replaying()
        if again is not None:
            kept = again.settings(kept)
        if context is not None:
            rendezvous = context.rendezvous
            if context.folder is not None and (kept.dir is not None or (context.keeps and not context.runs)):
                kept = kept.model_copy(update={"dir": str(context.folder)})
        elif worker is not None:
            kept = kept.model_copy(update={"dir": kept.dir and ray.run_folder(worker, kept.dir), "save_async": False})
            # Ray watches its workers and ends all if one fails: no heartbeats are needed, and errors are raised.
            rendezvous = join_ranks(ray.place(worker, os.environ), placement.rendezvous, placement.timeout_s)
            held.callback(rendezvous.leave)
        elif info is not None:
            life = membership(info, placement.rendezvous, placement.timeout_s, placement.lost_after_s)
            rendezvous = held.enter_context(life)
        else:
            _close_left(kept.dir)
            if warning := slurm.warning(os.environ):
                print(warning, file=sys.stderr)
            rendezvous = alone()  # errors propagate to the script, a notebook or a test
        with _ending(held):
            check_sinks(kept)
            size, asked = rendezvous.info.size, placement.processes
            if context is None and asked not in ("auto", size):
                raise UsageError(
                    f"placement.processes: got {asked}, but the world size is {size}; start {asked} processes with a "
                    f"launcher, such as torchrun --nproc-per-node={asked} or lockstep launch"
                )
            source = script_digests()
            decided = {"seed": settings.seed, "precision": settings.precision, "threads": settings.threads}
            recipe = PlainRecipe(1, seed=settings.seed, threads=settings.threads, precision=settings.precision)
            session = held.enter_context(open_rank(rendezvous, placement, recipe, decided | {"your script": source}))
            where = path = None
            if (folder := kept.dir) is not None:
                claim = run_folder.hold_run_folder(
                    rendezvous, lambda: run_folder.claim_own(Path(folder), signing_key(kept.key_file))
                )
                start = held.enter_context(claim)
                where, path = start.folder, start.checkpoint
            streams = [sys.stdout]
            if where is not None and not _interactive():
                log = where / run_folder.LOGS / log_name(rendezvous.info.rank)
                streams.append(held.enter_context(rendezvous.rank_log.capture(log)))
            world = held.enter_context(session.open_world())
            rank = Rank(rendezvous, world, where, machine.numerics(session.device), source)
            if warning := hashing.seed_warning(world.all_tell(hashing.probe())):
                rank.warn(warning)
            strategy, observe = (context.strategy, context.observe) if context is not None else (None, None)
            guarded = context is None or context.guarded
            if context is not None and observe is not None:  # verify compares placements and needs no terminal output
                rank.sinks = list(context.sinks)
            elif not world.rank:
                rank.sinks = held.enter_context(_sinks(kept, decided, where, streams))
                if where is not None:
                    sources = source | source_digests(own_paths(kept))
                    run_folder.record_environment(where, sources, [], {"backend": world.backend})
            if worker is not None and where is not None:
                rank.sinks = [*rank.sinks, RayReport(str(where), lead=world.rank == 0)]
            seed_generators(random.key(random.INITIAL, settings.seed))  # last, since a sink may draw random numbers
        settings = settings.model_copy(update={"run": kept})
        return Member(settings, rendezvous, rank, path, held, strategy, observe, guarded, again, worker is not None)

    def register(self, run: R) -> R:
        """Close the run when this process, or the function that joined it, ends. Return the run."""
        context = WORKER_CONTEXT.get()
        if context is not None:
            context.runs.append(run)
            return run
        if self.of_ray:
            return run
        left = weakref.ref(run)
        atexit.register(_at_exit, left)
        if not _interactive():
            sys.excepthook = _hook(left)
        _OPEN.append(run)
        self.held.callback(_OPEN.remove, run)
        return run

    def stop(self, reason: Reason, close: Callable[[], None]) -> NoReturn:
        """Close the run, which is saved, because of a signal, and end the script. In a notebook, only the cell ends."""
        close()
        if _interactive():
            raise KeyboardInterrupt(reason)
        raise SystemExit(EXIT_CODES[reason])

    def close(self, error: BaseException | None) -> None:
        """Leave the run.

        An error ends the process, unless the rank is alone, or Ray Train or a Lockstep worker handles the error.
        """
        self.held.__exit__(
            None if error is None else type(error), error, None if error is None else error.__traceback__
        )


def _read(read: Callable[[], Settings], info: RankInfo | None) -> Settings:
    """Return the settings passed to `join`. If they are invalid, all ranks of a launcher end, with one report."""
    try:
        return read()
    except UsageError as error:
        if info is not None:
            refuse(info, Placement().rendezvous, error)
        raise


def _close_left(folder: str | None) -> None:
    """Close this process's run in the folder of the next run, and all runs that began after it.

    An error left the loop of that run. The runs must be closed in reverse order, because each run restores the process
    state that it found when it began.
    """
    first = next((number for number, run in enumerate(_OPEN) if run._is_in(folder)), len(_OPEN))
    for run in reversed(_OPEN[first:]):
        run._abandon()


@contextmanager
def _ending(held: ExitStack) -> Iterator[None]:
    """If the block fails, undo everything entered into `held`. With several ranks, this ends the process."""
    try:
        yield
    except BaseException as error:
        held.__exit__(type(error), error, error.__traceback__)
        raise


@contextmanager
def _sinks(
    kept: Kept, decided: Mapping[str, Any], folder: Path | None, streams: Sequence[TextIO]
) -> Iterator[list[Sink]]:
    """Yield the sinks of rank 0, which writes to `streams`: the terminal and, if there is a run folder, its log."""
    if folder is None:
        with closing(Console(streams[0], None, "")) as console:
            yield [console]
        return
    with open_sinks(kept, decided, "", folder, streams) as found:
        yield found


def _interactive() -> bool:
    """Return whether the process is interactive, as in a notebook. An error must not end it."""
    return "ps1" in vars(sys)


def _at_exit(left: weakref.ref[R]) -> None:
    run = left()
    if run is not None:
        run.close()


def _hook(left: weakref.ref[R]) -> Hook:
    """Return the exception hook that ends the run and all ranks, and reports the error once and briefly."""

    def end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        run = left()
        if isinstance(error, KeyboardInterrupt):
            error = TrainingError("interrupted")
            error.exit_code = EXIT_INTERRUPTED
        if run is not None:
            run.close(error)  # with several ranks, the process ends here
        _report(kind, error, trace)

    return end


def _report(_kind: type[BaseException], error: BaseException, _trace: TracebackType | None) -> None:
    """Report the error of a script that runs as a single rank, and end it."""
    rendezvous = alone()
    rendezvous.end(failure_of(error, rendezvous.info, rendezvous.rank_log))
