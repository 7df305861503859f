"""The hint to run `lockstep verify`, printed when a custom loop first runs on several ranks."""

import multiprocessing
import shlex
from collections.abc import Sequence
from pathlib import Path

from lockstep.reporting.jsonl import EVENTS, read_events


def make_verify_hint(world_size: int, folder: Path | None, argv: Sequence[str], started_by_launch: bool = False) -> str:
    """Return the hint for the first run of a script on `world_size` ranks, or "" if the hint doesn't apply.

    The hint applies to scripts that train in their own process, because `lockstep verify` can't run anything else. It
    doesn't apply to a single rank, or to a run folder that already contains events, so call this function before the
    run writes its first event. `started_by_launch` is whether `lockstep launch` started this process.
    """
    is_child_of_script = multiprocessing.parent_process() is not None and not started_by_launch
    if world_size == 1 or not argv or not argv[0].endswith(".py") or is_child_of_script:
        return ""
    if folder is not None and (folder / EVENTS).exists() and any(True for _ in read_events(folder / EVENTS)):
        return ""
    command = shlex.join(["lockstep", "verify", *argv])
    ranks = f"{world_size} ranks"
    return f"first run of this loop on {ranks}; to compare it with one process, and with a resumed run: {command}"
