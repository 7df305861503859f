"""Finds run folders and reads their state: lock, job, machine and failure. Never imports torch."""

import fcntl
import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from lockstep.common import plainfile
from lockstep.common.text import printable_line
from lockstep.errors import UsageError
from lockstep.reporting.jsonl import EVENTS
from lockstep.training.checkpoint import durable
from lockstep.training.lock import LOCK

RESULT: Final = "result.json"
JOB_SCRIPT: Final = "job.sh"  # written by `lockstep submit`
JOB: Final = "job.json"
_ENVIRONMENT: Final = "environment.json"
_CHECKPOINTS: Final = "checkpoints"  # same as in training/checkpoint/store.py, which imports torch
_CHECKPOINT: Final = re.compile(r"step-(\d{8,})")
_MARKER_FILES: Final = (EVENTS, JOB, LOCK)  # a folder with any of these files is a run folder
_MAX_DEPTH: Final = 4
_MAX_JSON_BYTES: Final = 1 << 20  # maximum size of a JSON file to read
_MAX_REASON_CHARS: Final = 500  # longer reasons are truncated
_MAX_MACHINE_CHARS: Final = 200


@dataclass(frozen=True)
class SubmittedJob:
    """The last submitted Slurm job of a run: its ID, and the time of its submission in seconds since 1970."""

    job: int
    time: float


def find_run_folders(*folders: Path) -> Iterator[Path]:
    """Yield the run folders among `folders` and in their subfolders, up to four levels deep.

    Each run is only yielded once, even if multiple links point to it. Raises UsageError if a folder doesn't exist or
    can't be read.
    """
    real_paths = set()
    for folder in folders:
        try:
            for run in _find_runs(folder, _MAX_DEPTH):
                if (real := os.path.realpath(run)) not in real_paths:
                    real_paths.add(real)
                    yield run
        except FileNotFoundError:
            raise UsageError(
                f"{folder}: no such folder; pass a run folder, or a folder that contains run folders"
            ) from None
        except OSError as error:
            raise UsageError(f"{error.filename}: cannot be searched: {error.strerror}") from error


def record_job(folder: Path, submitted: SubmittedJob) -> None:
    """Record the last submitted job in the run folder. Writes the file atomically."""
    durable.replace(folder / JOB, (json.dumps(asdict(submitted)) + "\n").encode())


def read_job(folder: Path) -> SubmittedJob | None:
    """Return the last submitted job of a run, or None if there is none.

    Raises UsageError if the record can't be read.
    """
    try:
        match plainfile.parse_json(plainfile.read_bytes(folder / JOB, _MAX_JSON_BYTES)):
            case {"job": int(job), "time": float() | int() as submitted} if 0 <= submitted < 1e15:
                return SubmittedJob(job, float(submitted))
        raise ValueError("not a job record")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UsageError(f"{folder / JOB}: cannot be read ({error!r}); it should contain the job ID") from error


def read_failure_reason(folder: Path, *, ignore_transient: bool = False) -> str:
    """Return the reason for the failure of a run from result.json, or an empty string if the run didn't fail.

    With `ignore_transient`, also return an empty string for transient failures, after which a scheduler restarts runs.
    """
    result = read_json_dict(folder / RESULT)
    is_failure = result.get("event") == "failed" and not (ignore_transient and result.get("cause") == "transient")
    reason = result.get("reason") if is_failure else None
    return printable_line(reason)[:_MAX_REASON_CHARS] if isinstance(reason, str) else ""


def find_checkpoint_steps(folder: Path) -> frozenset[int]:
    """Return the steps of the checkpoints in a run folder."""
    try:
        names = os.listdir(folder / _CHECKPOINTS)
    except OSError:
        return frozenset()
    return frozenset(int(match[1]) for match in map(_CHECKPOINT.fullmatch, names) if match)


def describe_machine(folder: Path) -> str:
    """Describe the CPU cores, GPUs and torch version that a run uses. Returns "" if the description can't be read.

    The description is read from environment.json.
    """
    environment = read_json_dict(folder / _ENVIRONMENT)
    cpu, packages, gpus = environment.get("cpu"), environment.get("packages"), environment.get("gpus")
    gpu_names = [str(gpu.get("name")) for gpu in gpus if isinstance(gpu, dict)] if isinstance(gpus, list) else []
    parts = [f"{cpu.get('cores_usable')} cores of {cpu.get('model')}"] if isinstance(cpu, dict) else []
    parts += [f"{gpu_names.count(name)} {name}" for name in dict.fromkeys(gpu_names)]
    parts += [f"torch {packages['torch']}"] if isinstance(packages, dict) and packages.get("torch") else []
    return printable_line(", ".join(parts))[:_MAX_MACHINE_CHARS]


def is_locked(folder: Path) -> bool:
    """Return whether a process holds the lock of a run folder.

    The only way to check a lock is to acquire it. Therefore, this briefly acquires a shared lock, which other processes
    can acquire too. A run that starts at the same moment tries again (training/lock.py).
    """
    # OSError means that there is no lock file, or that the file system doesn't support locks. In both cases, no run can
    # be active.
    with suppress(OSError), plainfile.open_reader(folder / LOCK) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _find_runs(folder: Path, max_depth: int) -> Iterator[Path]:
    # Links come last, so that a run is found in its own folder first.
    entries = sorted(os.scandir(folder), key=lambda entry: (entry.is_symlink(), entry.name))
    if any(entry.name in _MARKER_FILES for entry in entries):
        yield folder
    elif max_depth:
        for entry in entries:
            if entry.is_dir() and not entry.name.startswith("."):
                yield from _find_runs(folder / entry.name, max_depth - 1)


def read_json_dict(file: Path) -> dict[str, Any]:
    """Return the dict in a JSON file, or an empty dict if it can't be read."""
    try:
        content = plainfile.parse_json(plainfile.read_bytes(file, _MAX_JSON_BYTES))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
