"""The run folder: which one, whether a run in it goes on, and what is written there before the first step.

runs/<recipe>-<model>-<time>/
├── config.yaml         the resolved configuration, with where each value came from; an own loop has none
├── environment.json    versions, devices, commit, hashes of the user's source files
├── deepspeed.json      what DeepSpeed was given, where the strategy is of that name
├── events.jsonl        everything that happened: the source of truth
├── digests.bin         a digest of each step's gradient (runs/digest_file.py)
├── skipped.txt         files that could not be read, where data.on_error is skip and there are any
├── last-evaluation.json  what the task reports in detail of the last evaluation
├── result.json         the last event and the exit code, once the run has ended, stopped or failed; then the reason too
├── checkpoints/        see training/checkpoint/store.py
├── logs/               rank-0.log, rank-1.log, ...: what each rank printed
├── tensorboard/        and of run.sinks: steps.csv, evaluations.csv, logged.csv, wandb/, mlflow/, the ids of their runs
└── lock
"""

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from lockstep.common.rank import ALONE
from lockstep.common.text import printable
from lockstep.config.recorded import CONFIG
from lockstep.device import machine
from lockstep.errors import ConfigError, HostError, TrainingError, UsageError, os_error_as
from lockstep.ranks.failure import Failure, failure_of
from lockstep.ranks.rank_log import RankLog
from lockstep.ranks.rendezvous import Rendezvous
from lockstep.runs.digest_file import DIGESTS
from lockstep.runs.runs import JOB, JOB_SCRIPT, RESULT
from lockstep.runs.worker_context import WORKER_CONTEXT
from lockstep.tasks.base import Report
from lockstep.training.checkpoint import durable, store
from lockstep.training.lock import LOCK, Lock, lock

ENVIRONMENT = "environment.json"
EVENTS = "events.jsonl"
LOGS = "logs"
SKIPPED = "skipped.txt"
TENSORBOARD = "tensorboard"
LAST_EVALUATION = "last-evaluation.json"
_HANDED_OVER: Final = "deepspeed.json"
_OF_SINKS: Final = ("steps.csv", "evaluations.csv", "logged.csv", "wandb-run.txt", "mlflow-run.txt")
_OF_START: Final = (CONFIG, ENVIRONMENT, _HANDED_OVER)
_FILES: Final = (*_OF_START, EVENTS, DIGESTS, SKIPPED, LAST_EVALUATION, RESULT, JOB_SCRIPT, JOB, LOCK, *_OF_SINKS)
_LONGEST_REASON: Final = 500


@dataclass(frozen=True)
class Claim:
    """A run folder that is ours, and the checkpoint to go on from, if any; `notes` are for the user to read.

    `made` are the folders that were not there before, the innermost first; `done` is what to say of a run that has
    nothing left to do. `before` is what the folder's last start left.
    """

    folder: Path
    lock: Lock
    made: list[Path]
    checkpoint: Path | None = None
    notes: list[str] = field(default_factory=list)
    done: str = ""
    before: "LastStart" = field(default_factory=lambda: LastStart(None, 0))

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Hold the folder while the block runs; where that raises an error, result.json has its exit code and reason.

        If a mistake is found before the run began, the folder stays as it was: a folder that was made for this start is
        removed, and result.json is that of the start before.
        """
        with self.lock, _settle_on_error(self.folder, self.made, self.before):
            yield

    def keep_failure(self, failure: Failure) -> None:
        """Write result.json for a failure of any rank, unless it refused this start."""
        if not self.before.is_refused(self.folder, failure):
            keep_failure(self.folder, failure)


@dataclass(frozen=True)
class LastStart:
    """What the last start left in a run folder: its result.json, and how long events.jsonl was."""

    result: bytes | None
    events: int

    @classmethod
    def read(cls, folder: Path) -> "LastStart":
        """Read it before this start changes anything."""
        result, events = folder / RESULT, folder / EVENTS
        return cls(result.read_bytes() if result.exists() else None, events.stat().st_size if events.exists() else 0)

    def is_refused(self, folder: Path, failure: Failure) -> bool:
        """Say whether a failure is a mistake that was found before this start wrote an event."""
        return failure.cause == "usage" and LastStart.read(folder).events <= self.events


@dataclass(frozen=True)
class RunStart:
    """Where a run begins: its folder, the checkpoint it goes on from, and what to say where nothing is left to do."""

    folder: Path
    checkpoint: Path | None
    done: str = ""


@contextmanager
def hold_run_folder(rendezvous: Rendezvous, make_claim: Callable[[], Claim]) -> Iterator[RunStart]:
    """Hold the run folder, which rank 0 claims, while the block runs; all ranks get where the run begins."""
    claim = make_claim() if rendezvous.info.rank == 0 else None
    with claim.hold() if claim else nullcontext():
        for note in claim.notes if claim else []:
            say(note)
        path = rendezvous.tell(str(claim.checkpoint or "") if claim else "")
        folder = rendezvous.tell(str(claim.folder) if claim else "")
        done = rendezvous.tell(claim.done if claim else "")
        if claim:
            rendezvous.keep_failure = claim.keep_failure
            if (context := WORKER_CONTEXT.get()) is not None and context.claimed is not None:
                context.claimed(claim.folder)
        yield RunStart(Path(folder), Path(path) if path else None, done)


def claim_folder(folder: Path, done: Callable[[], str], begin: Callable[[], tuple[Path | None, list[str]]]) -> Claim:
    """Lock `folder`, made if missing; then `done` says whether all is done, and `begin` where the run begins.

    `begin` returns the checkpoint to go on from, if any, and notes for the user.
    """
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    _refuse_foreign(folder)
    with os_error_as(UsageError, f"run.dir {folder}: cannot be used", "; choose another run.dir"):
        held = lock(folder)
    try:
        if words := done():
            return Claim(folder, held, made, done=words)
        before = LastStart.read(folder)
        with _settle_on_error(folder, made, before):
            checkpoint_path, notes = begin()
        (folder / RESULT).unlink(missing_ok=True)  # a script must not take it for the result of this start
    except BaseException:
        held.release()
        raise
    return Claim(folder, held, made, checkpoint_path, notes, before=before)


def claim_own(folder: Path, key: bytes | None) -> Claim:
    """Lock the folder of a run whose loop is the user's own; it goes on from its newest checkpoint."""

    def begin() -> tuple[Path | None, list[str]]:
        if os.path.lexists(folder / CONFIG):
            raise UsageError(f"{folder}: holds a run of a recipe, which its loop did not make; choose another dir")
        newest = store.newest(folder / store.FOLDER, key)
        return (None, []) if newest is None else (newest.path, checkpoint_warnings(newest))

    return claim_folder(folder, str, begin)


def checkpoint_warnings(checkpoint: store.FoundCheckpoint) -> list[str]:
    """Return a line for the user for each newer checkpoint that is damaged."""
    return [f"warning: {problem}" for problem in checkpoint.problems]


def record_config(folder: Path, config: str, engine_files: Mapping[str, str]) -> None:
    """Write the text of config.yaml and, by their names, the files that another framework's engine was given."""
    _write(folder / CONFIG, config)
    (folder / _HANDED_OVER).unlink(missing_ok=True)  # of a start under another strategy
    for name, text in engine_files.items():
        _write(folder / name, text)


def record_environment(
    folder: Path,
    source: Mapping[str, str],
    cores: Sequence[str],
    exchange: Mapping[str, Any],
    first_weights: Mapping[str, Any] | None = None,
) -> None:
    """Write environment.json.

    `cores` are those that each rank was bound to, by rank; `exchange` is how tensors travel between ranks, and
    `first_weights` what they were, if not the seed's.
    """
    placed = {"source": dict(source), "cores": list(cores), "exchange": dict(exchange)}
    placed |= {"first weights": dict(first_weights)} if first_weights else {}
    _write(folder / ENVIRONMENT, json.dumps(machine.environment() | placed, indent=1, sort_keys=True) + "\n")


def keep_last_evaluation(folder: Path, report: Report) -> None:
    """Write what a task reports of the last evaluation; TrainingError where the disk does not take it."""
    _write(folder / LAST_EVALUATION, json.dumps(report, indent=1))


def conclude(folder: Path, result: Mapping[str, Any]) -> None:
    """Write result.json: how the last start of the run ended. It is gone while the run goes on."""
    _write(folder / RESULT, json.dumps(result, indent=1) + "\n")


def say(text: str) -> None:
    """Write a line for the user, beside what a run prints."""
    print(printable(text), file=sys.stderr)


def settle(folder: Path, code: int, failure: Failure | None = None) -> None:
    """Write result.json for a start that ended with another exit code than 0 and has not concluded.

    Without a failure it was a signal, before the training began.
    """
    if code and not (folder / RESULT).exists():
        stopped = Failure(0, 1, socket.gethostname(), "ended by a signal", code, cause="transient")
        keep_failure(folder, failure or stopped)


def keep_failure(folder: Path, failure: Failure) -> None:
    """Write result.json for a start that failed: the first line of the error, its cause, and where it was."""
    reason = failure.line if failure.size > 1 else failure.first_line.removeprefix("error: ")
    found = {"exit_code": failure.exit_code, "reason": reason[:_LONGEST_REASON], "cause": failure.cause}
    # Of ranks that an audit named the reason has the hosts: the failure is that of a rank which reports them.
    where = {"ranks": failure.wrong} if failure.wrong else {"ranks": [failure.rank], "host": failure.host}
    with suppress(TrainingError):  # there is another error to report
        conclude(folder, {"event": "failed", "time": time.time(), **found, **where})


@contextmanager
def _settle_on_error(folder: Path, made: Sequence[Path], before: LastStart) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        failure = failure_of(error, ALONE, RankLog(ALONE))
        if isinstance(error, ConfigError):  # whose text has the number of problems before the first
            failure = replace(failure, text=str(error))
        if not before.is_refused(folder, failure):
            settle(folder, failure.exit_code, failure)
        elif made and not any((folder / name).exists() for name in (CONFIG, EVENTS)):
            _remove(folder, made)
        elif before.result is not None:  # a refused start leaves the reason of the one before
            _write(folder / RESULT, before.result.decode(errors="replace"))
        raise


def _remove(folder: Path, made: Sequence[Path]) -> None:
    """Remove the folders that a refused start made, and what it wrote; whatever else lies there stays."""
    with suppress(OSError):
        for log in (folder / LOGS).glob("rank-*.log"):
            log.unlink()
        (folder / LOGS).rmdir()
    with suppress(OSError):
        (folder / LOCK).unlink()
        for each in made:
            each.rmdir()


def _write(path: Path, text: str) -> None:
    with os_error_as(HostError, f"{path}: not written"):
        durable.replace(path, text.encode())


def fresh_folder(name: str) -> Path:
    """Return a folder of this name and the time that is not there yet; beside one of the same second, with a number."""
    dated = f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    names = (f"{dated}{suffix}" for suffix in ("", *(f"-{number}" for number in range(2, 1000))))
    return next(path for path in (Path("runs") / each for each in names) if not path.exists())


def _refuse_foreign(folder: Path) -> None:
    """Raise UsageError where what has the name of a run's file is none, or a link that leads out of the run's folder.

    The folder itself may be a link, which the user named.
    """
    inside = Path(os.path.realpath(folder))  # not resolve: of a link to itself that raises RuntimeError
    folders = [folder / name for name in (LOGS, TENSORBOARD, store.FOLDER, "mlflow", "wandb")]
    folders += (folder / store.FOLDER).glob("step-*")
    paths = [folder / name for name in _FILES]
    if strange := next((path for path in paths if path.exists() and not path.is_file()), None):
        raise UsageError(f"{strange}: not a file, as a run writes it; move it away, or choose another run.dir")
    paths += [*folders, *(path for each in folders if each.is_dir() for path in each.iterdir())]
    for path in paths:
        if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(inside):
            raise UsageError(
                f"{path}: a link that leads out of the run folder, to {path.readlink()}; put there what it leads to, "
                f"or let the run folder itself be a link"
            )
