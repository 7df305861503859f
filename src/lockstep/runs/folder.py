"""The run folder: how a run claims the folder, whether the run resumes, and the files at the start and end of the run.

runs/<recipe>-<model>-<time>/
├── config.yaml         the resolved configuration with the origin of each value; not written for a custom loop
├── environment.json    versions, devices, commit, hashes of the user's source files
├── deepspeed.json      the configuration of DeepSpeed, with the strategy deepspeed
├── events.jsonl        all events: the source of truth
├── digests.bin         digests of gradients and weights (runs/digest_file.py)
├── skipped.txt         unreadable files, if there are any and data.on_error is skip
├── last-evaluation.json  detailed results of the last evaluation
├── result.json         exit code and last event of a run that ended or stopped, or the reason if it failed
├── checkpoints/        see training/checkpoint/store.py
├── logs/               rank-0.log, rank-1.log, ...: the output of each rank
├── tensorboard/        and for run.sinks: steps.csv, evaluations.csv, logged.csv, wandb/, mlflow/, ids of their runs
└── lock
"""

import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from lockstep.common.location import get_local_folder, is_url
from lockstep.common.rank import ALONE
from lockstep.common.text import printable
from lockstep.config.recorded import CONFIG_NAME
from lockstep.device import machine
from lockstep.errors import ConfigError, HostError, TrainingError, UsageError, convert_os_error
from lockstep.ranks.failure import Failure, make_failure
from lockstep.ranks.rank_log import RankLog
from lockstep.ranks.rendezvous import Rendezvous
from lockstep.runs import remote
from lockstep.runs.digest_file import DIGESTS
from lockstep.runs.remote import RemoteClaim
from lockstep.runs.runs import JOB, JOB_SCRIPT, RESULT
from lockstep.runs.worker_context import WORKER_CONTEXT
from lockstep.tasks.base import TaskReport
from lockstep.training.checkpoint import durable, store
from lockstep.training.lock import LOCK, Lock, lock

ENVIRONMENT = "environment.json"
EVENTS = "events.jsonl"
LOGS = "logs"
SKIPPED = "skipped.txt"
TENSORBOARD = "tensorboard"
LAST_EVALUATION = "last-evaluation.json"
_ENGINE_CONFIG: Final = "deepspeed.json"
_SINK_FILES: Final = ("steps.csv", "evaluations.csv", "logged.csv", "wandb-run.txt", "mlflow-run.txt")
_START_FILES: Final = (CONFIG_NAME, ENVIRONMENT, _ENGINE_CONFIG)
_FILES: Final = (*_START_FILES, EVENTS, DIGESTS, SKIPPED, LAST_EVALUATION, RESULT, JOB_SCRIPT, JOB, LOCK, *_SINK_FILES)
_MAX_REASON_CHARS: Final = 500


@dataclass(frozen=True)
class Claim:
    """A run folder that this process has locked for its run.

    - `created`: The folders that were created for the run, with the innermost folder first.
    - `checkpoint`: The checkpoint to resume from, if any.
    - `notes`: Messages for the user.
    - `done_message`: The message if the run is already complete, or else an empty string.
    - `last_start`: The state of the folder after the previous start of the run.
    - `remote`: The claim of the run folder in object storage, if `run.dir` is a URL.
    """

    folder: Path
    lock: Lock
    created: list[Path]
    checkpoint: Path | None = None
    notes: list[str] = field(default_factory=list)
    done_message: str = ""
    last_start: "LastStart" = field(default_factory=lambda: LastStart(None, 0))
    remote: RemoteClaim | None = None

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Return a context manager that holds the lock.

        If its `with` block raises an error, the exit code and the reason are written to result.json. If the error is a
        usage error and training hasn't begun, changes are undone instead: the folders that this process created are
        removed, or the result.json of the previous start is restored.
        """
        with (
            self.lock,
            self.remote or nullcontext(),
            _write_failure_on_error(self.folder, self.created, self.last_start),
        ):
            yield

    def write_failure(self, failure: Failure) -> None:
        """Write result.json for a failure of any rank.

        If a usage error prevented the start of a run in a folder that existed before, restore the result.json of its
        previous start instead. A new folder stays, because other ranks may be writing to their logs in it.
        """
        if self.created or not self.last_start.is_rejected_start(self.folder, failure):
            write_failure(self.folder, failure)
        else:
            with suppress(HostError):  # must not hide the original error
                self.last_start.restore(self.folder)
        if self.remote is not None:
            self.remote.close()

    def release(self) -> None:
        """Release the locks of a folder that was only claimed to check it."""
        with self.lock, self.remote or nullcontext():
            pass


@dataclass(frozen=True)
class LastStart:
    """What the previous start of a run left in the run folder: result.json, and the size of events.jsonl."""

    result: bytes | None
    num_event_bytes: int

    @classmethod
    def read(cls, folder: Path) -> "LastStart":
        """Read the state of a folder. Call this function before the run changes the folder."""
        result, events = folder / RESULT, folder / EVENTS
        return cls(result.read_bytes() if result.exists() else None, events.stat().st_size if events.exists() else 0)

    def is_rejected_start(self, folder: Path, failure: Failure) -> bool:
        """Return whether a failure is a usage error that ended this start of the run before it wrote an event."""
        return failure.cause == "usage" and LastStart.read(folder).num_event_bytes <= self.num_event_bytes

    def restore(self, folder: Path) -> None:
        """Restore the result.json of the previous start, if there was one."""
        if self.result is not None:
            _write_text(folder / RESULT, self.result.decode(errors="replace"))


@dataclass(frozen=True)
class RunStart:
    """The start of a run: its folder, the checkpoint to resume from, and a message if the run is already complete."""

    folder: Path
    checkpoint: Path | None
    done_message: str = ""


@contextmanager
def hold_run_folder(
    rendezvous: Rendezvous, make_claim: Callable[[], Claim], location: str | None
) -> Iterator[RunStart]:
    """Return a context manager that holds the run folder. All ranks must enter it.

    Rank 0 claims the folder with `make_claim`. If `location`, the value of run.dir, is a URL, each host has a separate
    folder with the checkpoint to resume from.
    """
    claim = make_claim() if rendezvous.info.rank == 0 else None
    with claim.hold() if claim else nullcontext():
        for note in claim.notes if claim else []:
            print_message(note)
        path = rendezvous.broadcast_text(str(claim.checkpoint or "") if claim else "")
        folder = rendezvous.broadcast_text(str(claim.folder) if claim else "")
        done_message = rendezvous.broadcast_text(claim.done_message if claim else "")
        if claim:
            rendezvous.write_failure = claim.write_failure
            if (context := WORKER_CONTEXT.get()) is not None and context.on_claim is not None:
                context.on_claim(claim.folder)
        start = RunStart(Path(folder), Path(path) if path else None, done_message)
        if location is not None and is_url(location):
            start_id = rendezvous.broadcast_text(claim.remote.start_id if claim and claim.remote else "")
            checkpoint = start.checkpoint  # with run.resume, it can be in a different run
            name = checkpoint.name if checkpoint and checkpoint.parent.parent == start.folder else ""
            own_folder, own_checkpoint = remote.join_folder(location, start_id, name)
            start = RunStart(own_folder, own_checkpoint or checkpoint, done_message)
            with remote.upload_logs(location, start_id):
                yield start
        else:
            yield start


def claim_folder(
    folder: Path,
    make_done_message: Callable[[], str],
    find_start: Callable[[], tuple[Path | None, list[str]]],
    claim_remote: Callable[[], RemoteClaim] | None = None,
) -> Claim:
    """Claim a run folder by locking it. If the folder doesn't exist, create it.

    - `make_done_message`: Returns a message if the run is already complete, or else an empty string.
    - `find_start`: Returns the checkpoint to resume from, if any, and messages for the user.
    - `claim_remote`: Claims the URL, if `folder` is the local folder of a URL.

    Raises UsageError if the folder is in use or can't be used.
    """
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    _check_paths(folder)
    with convert_os_error(UsageError, f"run.dir {folder}: cannot be used", "; choose a different run.dir"):
        folder_lock = lock(folder)
    remote_claim: RemoteClaim | None = None
    try:
        remote_claim = None if claim_remote is None else claim_remote()
        if done_text := make_done_message():
            return Claim(folder, folder_lock, created, done_message=done_text, remote=remote_claim)
        last_start = LastStart.read(folder)
        with _write_failure_on_error(folder, created, last_start):
            checkpoint_path, notes = find_start()
        (folder / RESULT).unlink(missing_ok=True)  # otherwise, scripts could read an outdated result
    except BaseException as error:
        with folder_lock:
            if remote_claim is not None:
                remote_claim.__exit__(type(error), error, error.__traceback__)
        raise
    return Claim(folder, folder_lock, created, checkpoint_path, notes, last_start=last_start, remote=remote_claim)


def claim_location(
    location: str,
    keep: int,
    make_done_message: Callable[[], str],
    find_start: Callable[[], tuple[Path | None, list[str]]],
) -> Claim:
    """Lock the run folder at a path or URL, the value of run.dir. See `claim_folder`."""
    folder = get_local_folder(location)
    if not is_url(location):
        return claim_folder(folder, make_done_message, find_start)
    try:
        return claim_folder(folder, make_done_message, find_start, lambda: remote.claim(location, keep, print_message))
    except UsageError as error:  # show the URL, because the user doesn't know the local folder
        text = re.sub(rf"(^|run\.dir[ =]){re.escape(str(folder))}", rf"\1{location}", str(error), flags=re.MULTILINE)
        raise UsageError(text) from error


def claim_loop_folder(location: str | Path, key: bytes | None, keep: int = 3) -> Claim:
    """Claim the run folder of a custom training loop. The run resumes from the newest checkpoint in the folder."""
    folder = get_local_folder(str(location))

    def find_start() -> tuple[Path | None, list[str]]:
        if os.path.lexists(folder / CONFIG_NAME):
            raise UsageError(f"{folder}: contains a run of a recipe, not of a custom loop; choose a different dir")
        newest = store.load_newest(folder / store.FOLDER, key)
        return (None, []) if newest is None else (newest.path, make_checkpoint_warnings(newest))

    return claim_location(str(location), keep, str, find_start)


def make_checkpoint_warnings(checkpoint: store.FoundCheckpoint) -> list[str]:
    """Return a warning for each damaged checkpoint that is newer than `checkpoint`."""
    return [f"warning: {problem}" for problem in checkpoint.problems]


def record_config(folder: Path, config: str, engine_files: Mapping[str, str]) -> None:
    """Write config.yaml, and the configuration files of an external engine. `engine_files` maps names to content."""
    _write_text(folder / CONFIG_NAME, config)
    (folder / _ENGINE_CONFIG).unlink(missing_ok=True)  # left over from a run started with a different strategy
    for name, text in engine_files.items():
        _write_text(folder / name, text)


def record_environment(
    folder: Path,
    source: Mapping[str, str],
    cores: Sequence[str],
    communication: Mapping[str, Any],
    first_weights: Mapping[str, Any] | None = None,
) -> None:
    """Write environment.json.

    - `source`: The hashes of the user's source files.
    - `cores`: The cores that each rank is bound to.
    - `communication`: How the ranks communicate tensors.
    - `first_weights`: The initial weights, if they don't come from the seed.
    """
    run_info = {"source": dict(source), "cores": list(cores), "exchange": dict(communication)}
    run_info |= {"first weights": dict(first_weights)} if first_weights else {}
    _write_text(
        folder / ENVIRONMENT, json.dumps(machine.describe_environment() | run_info, indent=1, sort_keys=True) + "\n"
    )


def write_last_evaluation(folder: Path, report: TaskReport) -> None:
    """Write the report of a task about the last evaluation. Raise HostError if the file can't be written."""
    _write_text(folder / LAST_EVALUATION, json.dumps(report, indent=1))


def write_result(folder: Path, result: Mapping[str, Any]) -> None:
    """Write result.json.

    Call this function when the run ends, because the file must not exist while a run is in progress.
    """
    _write_text(folder / RESULT, json.dumps(result, indent=1) + "\n")


def print_message(text: str) -> None:
    """Print a message for the user to stderr."""
    print(printable(text), file=sys.stderr)


def write_exit(folder: Path, code: int, failure: Failure | None = None) -> None:
    """Write result.json for a run that ends with a nonzero exit code, unless the file exists.

    If `failure` is None, a signal ended the run before training began.
    """
    if code and not (folder / RESULT).exists():
        stopped = Failure(0, 1, socket.gethostname(), "ended by a signal", code, cause="transient")
        write_failure(folder, failure or stopped)


def write_failure(folder: Path, failure: Failure) -> None:
    """Write result.json for a failed run, with the first line of the error, its cause, its ranks and its host."""
    reason = failure.summary if failure.size > 1 else failure.first_line.removeprefix("error: ")
    outcome = {"exit_code": failure.exit_code, "reason": reason[:_MAX_REASON_CHARS], "cause": failure.cause}
    # If an audit identified ranks, the reason contains the hosts of these ranks. `failure.host` is the host of the rank
    # that reports the failure.
    location = {"ranks": failure.wrong} if failure.wrong else {"ranks": [failure.rank], "host": failure.host}
    with suppress(TrainingError):  # an error while writing the file must not hide the original error
        write_result(folder, {"event": "failed", "time": time.time(), **outcome, **location})


@contextmanager
def _write_failure_on_error(folder: Path, created_paths: Sequence[Path], last_start: LastStart) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        failure = make_failure(error, ALONE, RankLog(ALONE))
        if isinstance(error, ConfigError):  # the text of a ConfigError starts with the number of problems
            failure = replace(failure, text=str(error))
        if not last_start.is_rejected_start(folder, failure):
            write_exit(folder, failure.exit_code, failure)
        elif created_paths and not any((folder / name).exists() for name in (CONFIG_NAME, EVENTS)):
            _remove_created_paths(folder, created_paths)
        else:
            last_start.restore(folder)
        raise


def _remove_created_paths(folder: Path, created_paths: Sequence[Path]) -> None:
    """Remove the folders and files that a rejected start of a run has created. Keep all other files."""
    with suppress(OSError):
        for log in (folder / LOGS).glob("rank-*.log"):
            log.unlink()
        (folder / LOGS).rmdir()
    with suppress(OSError):
        (folder / LOCK).unlink()
        for parent in created_paths:
            parent.rmdir()


def _write_text(path: Path, text: str) -> None:
    with convert_os_error(HostError, f"{path}: not written"):
        durable.replace(path, text.encode())


def make_folder_path(name: str) -> Path:
    """Return a path runs/NAME-TIME that doesn't exist yet. If the path exists, append a number."""
    dated = f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    names = (f"{dated}{suffix}" for suffix in ("", *(f"-{number}" for number in range(2, 1000))))
    return next(path for path in (Path("runs") / candidate for candidate in names) if not path.exists())


def _check_paths(folder: Path) -> None:
    """Raise UsageError if a file in the run folder isn't a regular file, or if a path links out of the run folder.

    The folder itself may be a link, because the user named it.
    """
    inside = Path(os.path.realpath(folder))  # Path.resolve raises RuntimeError for a link to itself
    folders = [folder / name for name in (LOGS, TENSORBOARD, store.FOLDER, "mlflow", "wandb")]
    folders += (folder / store.FOLDER).glob("step-*")
    paths = [folder / name for name in _FILES]
    if irregular := next((path for path in paths if path.exists() and not path.is_file()), None):
        raise UsageError(f"{irregular}: must be a regular file; move it away, or choose a different run.dir")
    paths += [*folders, *(path for subfolder in folders if subfolder.is_dir() for path in subfolder.iterdir())]
    for path in paths:
        if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(inside):
            raise UsageError(
                f"{path}: is a link out of the run folder, to {path.readlink()}; replace the link with its target, or "
                f"make the run folder itself a link"
            )
