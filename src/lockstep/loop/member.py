"""The lifetime of a rank in a custom training loop: it joins the other ranks, sets up its outputs, and exits."""

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
from lockstep.common.location import get_location
from lockstep.common.rank import RankInfo
from lockstep.common.user_source import hash_script, hash_sources
from lockstep.config.placement import Placement
from lockstep.config.run import RunConfig as RunSettings
from lockstep.core import random
from lockstep.core.engine_recipe import PlainRecipe
from lockstep.data.items import seed_rngs
from lockstep.device import machine
from lockstep.errors import EXIT_INTERRUPTED, TrainingError, UsageError
from lockstep.launchers import detect_rank, ray, slurm
from lockstep.loop.replaying import ReplayRequest, read_replay_request
from lockstep.loop.settings import JoinSettings
from lockstep.ranks.external import exit_before_join, join_job, join_ranks, make_single_process_rendezvous
from lockstep.ranks.failure import make_failure
from lockstep.ranks.open_group import find_rank_in_open_group, mark_hosted_by_open_group
from lockstep.ranks.rank_log import get_log_name
from lockstep.ranks.rendezvous import Rendezvous
from lockstep.ranks.signals import EXIT_CODES, StopSignal
from lockstep.reporting.console import Console
from lockstep.reporting.ray import RayReport
from lockstep.reporting.sink import Sink
from lockstep.run.rank import Rank
from lockstep.run.session import open_rank
from lockstep.run.sinks import check_sinks, list_custom_sinks, open_sinks
from lockstep.runs import folder as run_folder
from lockstep.runs.remote import check_run_dir
from lockstep.runs.worker_context import VERIFYING, WORKER_CONTEXT, OpenRun, StepObserver
from lockstep.training.checkpoint.signing import read_signing_key

R = TypeVar("R", bound=OpenRun)
ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], None]

# The open runs of this process. There can be several, because an error in a notebook neither ends the process nor
# closes the run.
_OPEN_RUNS: Final[list[OpenRun]] = []


@dataclass(frozen=True, eq=False)
class Member:
    """A rank that has joined the run, with its settings. `checkpoint` is the checkpoint to resume from, if any."""

    settings: JoinSettings
    rendezvous: Rendezvous
    rank: Rank
    checkpoint: Path | None
    resources: ExitStack
    strategy: str | dict[str, Any] | None = None
    observe: StepObserver | None = None
    guarded: bool = True
    replay: ReplayRequest | None = None  # set if `lockstep replay` runs the script
    is_ray_worker: bool = False  # whether this is a Ray Train worker; if so, Ray handles errors and ends the process

    @staticmethod
    def join(read_settings: Callable[[], JoinSettings]) -> "Member":
        """Join the other ranks and set up this rank. `read_settings` returns the settings of the run.

        An error ends this process. On a single rank, or in a Ray Train worker, the error is raised instead.
        """
        context, resources = WORKER_CONTEXT.get(), ExitStack()
        if context is None and VERIFYING in os.environ:
            read_settings = _refuse_verification
        worker = ray.get_train_context() if context is None else None
        info = None
        if context is None and worker is None:
            launched = detect_rank()
            info = find_rank_in_open_group() if launched is None else mark_hosted_by_open_group(launched)
        if context is None and worker is None and not _is_interactive():
            sys.excepthook = _report_error  # `register` replaces this hook when there is a run
        settings = _read_settings(read_settings, info)
        placement, run_config = settings.placement, settings.run
        replay = read_replay_request()
        if replay is not None:
            run_config = replay.make_run_settings(run_config)
        if context is not None:
            rendezvous = context.rendezvous
            if context.folder is not None and (
                run_config.dir is not None or (context.keeps_first_run and not context.runs)
            ):
                run_config = run_config.model_copy(update={"dir": str(context.folder)})
        elif worker is not None:
            run_config = run_config.model_copy(
                update={"dir": run_config.dir and ray.resolve_run_folder(worker, run_config.dir), "save_async": False}
            )
            # Ray monitors its workers, and ends all of them if one fails, so the ranks need no heartbeats.
            rendezvous = join_ranks(ray.read_rank(worker, os.environ), placement.rendezvous, placement.timeout_s)
            resources.callback(rendezvous.leave)
        elif info is not None:
            rank_membership = join_job(info, placement.rendezvous, placement.timeout_s, placement.lost_after_s)
            rendezvous = resources.enter_context(rank_membership)
        else:
            _close_abandoned_runs(run_config.dir)
            if warning := slurm.make_warning(os.environ):
                print(warning, file=sys.stderr)
            # Errors propagate to the caller, such as a notebook or a test.
            rendezvous = make_single_process_rendezvous()
        with _release_on_error(resources):
            check_sinks(run_config)
            size, processes = rendezvous.info.size, placement.processes
            check_run_dir(run_config.dir, size)
            if context is None and processes not in ("auto", size):
                raise UsageError(
                    f"placement.processes: got {processes}, but the world size is {size}; start {processes} processes "
                    f"with a launcher, such as torchrun --nproc-per-node={processes} or lockstep launch"
                )
            source = hash_script()
            decisive_settings = {"seed": settings.seed, "precision": settings.precision, "threads": settings.threads}
            recipe = PlainRecipe(1, seed=settings.seed, threads=settings.threads, precision=settings.precision)
            session = resources.enter_context(
                open_rank(rendezvous, placement, recipe, decisive_settings | {"your script": source})
            )
            folder_path = checkpoint_path = None
            if (folder := run_config.dir) is not None:
                key = read_signing_key(run_config.key_file)
                claim = run_folder.hold_run_folder(
                    rendezvous, lambda: run_folder.claim_loop_folder(folder, key, run_config.keep), folder
                )
                start = resources.enter_context(claim)
                folder_path, checkpoint_path = start.folder, start.checkpoint
            streams = [sys.stdout]
            if folder_path is not None and not _is_interactive():
                log = folder_path / run_folder.LOGS / get_log_name(rendezvous.info.rank)
                streams.append(resources.enter_context(rendezvous.rank_log.capture(log)))
            world = resources.enter_context(session.open_world())
            rank = Rank(rendezvous, world, folder_path, machine.make_fingerprint(session.device), source)
            if warning := hashing.make_hash_seed_warning(world.all_gather_text(hashing.get_sample_hash())):
                rank.warn(warning)
            strategy, observe = (context.strategy, context.observe) if context is not None else (None, None)
            guarded = context is None or context.guarded
            if context is not None and observe is not None:  # `lockstep verify` runs the script and needs no console
                rank.sinks = list(context.sinks)
            elif not world.rank:
                rank.sinks = resources.enter_context(_open_sinks(run_config, decisive_settings, folder_path, streams))
                if folder_path is not None:
                    sources = source | hash_sources(list_custom_sinks(run_config))
                    run_folder.record_environment(folder_path, sources, [], {"backend": world.backend})
            if worker is not None and folder_path is not None:
                rank.sinks = [
                    *rank.sinks,
                    RayReport(get_location(folder_path, run_config.dir), is_rank_0=world.rank == 0),
                ]
            seed_rngs(random.make_key(random.INITIAL, settings.seed))  # after the sinks, which may draw random numbers
        settings = settings.model_copy(update={"run": run_config})
        return Member(
            settings,
            rendezvous,
            rank,
            checkpoint_path,
            resources,
            strategy,
            observe,
            guarded,
            replay,
            worker is not None,
        )

    def register(self, run: R) -> R:
        """Arrange for the run to be closed when this process or the worker function ends. Returns the run."""
        context = WORKER_CONTEXT.get()
        if context is not None:
            context.runs.append(run)
            return run
        if self.is_ray_worker:
            return run
        run_reference = weakref.ref(run)
        atexit.register(_close_at_exit, run_reference)
        if not _is_interactive():
            sys.excepthook = _make_except_hook(run_reference)
        _OPEN_RUNS.append(run)
        self.resources.callback(_OPEN_RUNS.remove, run)
        return run

    def stop(self, reason: StopSignal, close: Callable[[], None]) -> NoReturn:
        """Close the run and end the script because of a signal. In a notebook, only the current cell ends.

        The caller must save the run first.
        """
        close()
        if _is_interactive():
            raise KeyboardInterrupt(reason)
        raise SystemExit(EXIT_CODES[reason])

    def close(self, error: BaseException | None) -> None:
        """Release the resources of the run.

        If `error` is set, this method ends the process, except on a single rank, in a Ray Train worker, or in a worker
        that Lockstep started.
        """
        self.resources.__exit__(
            None if error is None else type(error), error, None if error is None else error.__traceback__
        )


def _refuse_verification() -> NoReturn:
    raise UsageError(
        "lockstep verify: the script starts its own processes, which would not take part in the comparison; "
        "verify the function that they call, with lockstep.verify(FUNCTION)"
    )


def _read_settings(read_settings: Callable[[], JoinSettings], info: RankInfo | None) -> JoinSettings:
    """Return the validated arguments of `join`. If they are invalid, all ranks exit, and one rank reports the error."""
    try:
        return read_settings()
    except UsageError as error:
        if info is not None:
            exit_before_join(info, Placement().rendezvous, error)
        raise


def _close_abandoned_runs(folder: str | None) -> None:
    """Close the open run in `folder`, and all runs that began after it.

    In a notebook, a loop that ends with an error leaves its run open. Runs must be closed in reverse order, because
    each run restores the process state from before it began.
    """
    first_index = next((number for number, run in enumerate(_OPEN_RUNS) if run._uses_folder(folder)), len(_OPEN_RUNS))
    for run in reversed(_OPEN_RUNS[first_index:]):
        run._abandon()


@contextmanager
def _release_on_error(resources: ExitStack) -> Iterator[None]:
    """Release `resources` if the `with` block raises an exception. With several ranks, this ends the process."""
    try:
        yield
    except BaseException as error:
        resources.__exit__(type(error), error, error.__traceback__)
        raise


@contextmanager
def _open_sinks(
    run_config: RunSettings, decisive_settings: Mapping[str, Any], folder: Path | None, streams: Sequence[TextIO]
) -> Iterator[list[Sink]]:
    """Yield the sinks of rank 0. `streams` are the terminal and, if there is a run folder, the log of the rank."""
    if folder is None:
        with closing(Console(streams[0], None, "")) as console:
            yield [console]
        return
    with open_sinks(run_config, decisive_settings, "", folder, streams) as sinks:
        yield sinks


def _is_interactive() -> bool:
    """Return whether this is an interactive process, such as a notebook, which an error must not end."""
    return "ps1" in vars(sys)


def _close_at_exit(run_reference: weakref.ref[R]) -> None:
    run = run_reference()
    if run is not None:
        run.close()


def _make_except_hook(run_reference: weakref.ref[R]) -> ExceptHook:
    """Return an exception hook that closes the run, ends all ranks, and reports the error once."""

    def end_run(error_type: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        run = run_reference()
        if isinstance(error, KeyboardInterrupt):
            error = TrainingError("interrupted")
            error.exit_code = EXIT_INTERRUPTED
        if run is not None:
            run.close(error)  # with several ranks, the process ends here
        _report_error(error_type, error, trace)

    return end_run


def _report_error(_kind: type[BaseException], error: BaseException, _trace: TracebackType | None) -> None:
    """Report the error of a script that runs as a single rank, and end the process."""
    rendezvous = make_single_process_rendezvous()
    rendezvous.end(make_failure(error, rendezvous.info, rendezvous.rank_log))
