"""The line that tells a user how to verify a loop of their own, when it first runs on several ranks."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from lockstep.reporting.jsonl import EVENTS, read


def verify_hint(size: int, folder: Path | None, argv: Sequence[str]) -> str:
    """Return the line for the first run of a script on `size` ranks; "" for one rank, a later run or no script.

    Call it before the run writes its first event: a folder with events had a run before.
    """
    if size == 1 or not argv or not argv[0].endswith(".py"):
        return ""
    if folder is not None and (folder / EVENTS).exists() and any(True for _ in read(folder / EVENTS)):
        return ""
    command = shlex.join(["lockstep", "verify", *argv])
    return f"first run of this loop on {size} ranks; to compare it with one process, and with a resumed run: {command}"
