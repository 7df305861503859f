"""Finds run folders, and asks whether a process is at work in one. Quick: no torch."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from lockstep.common import plainfile
from lockstep.common.text import printable_line
from lockstep.errors import UsageError
from lockstep.reporting.jsonl import EVENTS
from lockstep.run.submitted import RECORD
from lockstep.training.lock import LOCK

RESULT: Final = "result.json"
CONFIG: Final = "config.yaml"
_SIGNS: Final = (EVENTS, RECORD, LOCK)  # any of them makes a folder a run's
_DEEPEST: Final = 4
_LARGEST: Final = 1 << 16  # bytes of result.json, which has some hundreds
_LONGEST: Final = 500  # characters of a reason


def run_folders(folder: Path) -> Iterator[Path]:
    """Yield `folder` if it is a run's, else those of runs in it and below; a folder that is not there is an error."""
    try:
        yield from _below(folder, _DEEPEST)
    except FileNotFoundError:
        raise UsageError(f"{folder}: no such folder; name a run folder, or a folder that has some") from None
    except OSError as error:
        raise UsageError(f"{error.filename}: cannot be looked into: {error.strerror}") from error


def failure(folder: Path) -> str:
    """Return why the last start of a run failed, as its result.json says; empty where it does not."""
    try:
        found = plainfile.parsed(plainfile.content(folder / RESULT, _LARGEST))
    except (OSError, ValueError):
        return ""
    reason = found.get("reason") if isinstance(found, dict) and found.get("event") == "failed" else None
    return printable_line(reason)[:_LONGEST] if isinstance(reason, str) else ""


def is_held(folder: Path) -> bool:
    """Return whether a process holds the lock of a run folder.

    The kernel tells only whoever asks for the lock. Asked for is the shared kind, for a moment, with which several may
    ask at once; a run that begins in that moment tries again (training/lock.py).
    """
    try:
        descriptor = plainfile.descriptor(folder / LOCK)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system that cannot lock: no run begins there either
        return False
    finally:
        os.close(descriptor)
    return False


def _below(folder: Path, depth: int) -> Iterator[Path]:
    entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    if any(entry.name in _SIGNS for entry in entries):
        yield folder
    elif depth:
        for entry in entries:
            if entry.is_dir() and not entry.name.startswith("."):
                yield from _below(folder / entry.name, depth - 1)
