"""Run folders from outside: where they are, whether one is in use, its job, its machine, its failure. No torch."""

import fcntl
import json
import os
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
JOB_SCRIPT: Final = "job.sh"  # what `lockstep submit` leaves
JOB: Final = "job.json"
_ENVIRONMENT: Final = "environment.json"
_SIGNS: Final = (EVENTS, JOB, LOCK)  # any of them makes a folder a run's
_DEEPEST: Final = 4
_LARGEST: Final = 1 << 20  # bytes of a file of JSON
_LONGEST: Final = 500  # characters of a reason
_LONGEST_MACHINE: Final = 200


@dataclass(frozen=True)
class Submitted:
    """The last job of a run; `time` is when it was submitted, in seconds since 1970."""

    job: int
    time: float


def run_folders(*folders: Path) -> Iterator[Path]:
    """Yield each of `folders` that is a run's, else those of runs in it and below; one that is not there is an error.

    A run is found once, whatever links to it.
    """
    found = set()
    for folder in folders:
        try:
            for run in _below(folder, _DEEPEST):
                if (real := os.path.realpath(run)) not in found:
                    found.add(real)
                    yield run
        except FileNotFoundError:
            raise UsageError(f"{folder}: no such folder; name a run folder, or a folder that has some") from None
        except OSError as error:
            raise UsageError(f"{error.filename}: cannot be looked into: {error.strerror}") from error


def record_job(folder: Path, submitted: Submitted) -> None:
    """Keep the job of a run folder, whole or not at all."""
    durable.replace(folder / JOB, (json.dumps(asdict(submitted)) + "\n").encode())


def job_of(folder: Path) -> Submitted | None:
    """Return the last job of a run folder, None where it was never submitted; UsageError where it cannot be read."""
    try:
        match plainfile.parse_json(plainfile.content(folder / JOB, _LARGEST)):
            case {"job": int(job), "time": float() | int() as submitted} if 0 <= submitted < 1e15:
                return Submitted(job, float(submitted))
        raise ValueError("not a job's record")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UsageError(f"{folder / JOB}: cannot be read ({error!r}); it holds the number of the job") from error


def failure(folder: Path) -> str:
    """Return why the last start of a run failed, as its result.json says; empty where it does not."""
    found = json_in(folder / RESULT)
    reason = found.get("reason") if found.get("event") == "failed" else None
    return printable_line(reason)[:_LONGEST] if isinstance(reason, str) else ""


def machine_of(folder: Path) -> str:
    """Return cores, GPUs and versions in words, as a run's environment.json says; empty where it cannot be read."""
    found = json_in(folder / _ENVIRONMENT)
    cpu, packages, gpus = found.get("cpu"), found.get("packages"), found.get("gpus")
    cards = [str(gpu.get("name")) for gpu in gpus if isinstance(gpu, dict)] if isinstance(gpus, list) else []
    words = [f"{cpu.get('cores_usable')} cores of {cpu.get('model')}"] if isinstance(cpu, dict) else []
    words += [f"{cards.count(card)} {card}" for card in dict.fromkeys(cards)]
    words += [f"torch {packages['torch']}"] if isinstance(packages, dict) and packages.get("torch") else []
    return printable_line(", ".join(words))[:_LONGEST_MACHINE]


def is_held(folder: Path) -> bool:
    """Return whether a process holds the lock of a run folder.

    The kernel tells only whoever asks for the lock. Asked for is the shared kind, for a moment, with which several may
    ask at once; a run that begins in that moment tries again (training/lock.py).
    """
    # OSError: there is no lock, or a file system that cannot lock, where no run begins either.
    with suppress(OSError), plainfile.reader(folder / LOCK) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _below(folder: Path, depth: int) -> Iterator[Path]:
    entries = sorted(os.scandir(folder), key=lambda entry: (entry.is_symlink(), entry.name))  # a run by its own name
    if any(entry.name in _SIGNS for entry in entries):
        yield folder
    elif depth:
        for entry in entries:
            if entry.is_dir() and not entry.name.startswith("."):
                yield from _below(folder / entry.name, depth - 1)


def json_in(file: Path) -> dict[str, Any]:
    """Return what a file of JSON holds, empty where it cannot be read."""
    try:
        found = plainfile.parse_json(plainfile.content(file, _LARGEST))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
