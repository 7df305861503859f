"""`lockstep report` below its options: what run folders hold, for a page. Quick: no torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from lockstep.config.recorded import recorded_placement
from lockstep.errors import UsageError
from lockstep.reporting import jsonl
from lockstep.reporting.history import History, history
from lockstep.reporting.run_page import Reported
from lockstep.run.listing import listed
from lockstep.run.machine_record import machine_of
from lockstep.run.runs import CONFIG


def reported(folders: Sequence[Path]) -> tuple[list[Reported], list[str]]:
    """Return the runs in the folders, in the order of their names, and warnings; no run at all is an error.

    Which folders hold runs is decided as for `lockstep jobs`. Nothing of a run is executed, nothing is unpickled.
    """
    runs, warnings = listed(folders)
    if not runs:
        raise UsageError(f"{', '.join(map(str, folders))}: no runs; name run folders, or a folder of some")
    unique = {run.folder: run for run in sorted(runs, key=lambda run: run.folder)}
    return [
        Reported(
            run,
            History() if run.state == "unreadable" else _history(Path(folder)),
            recorded_placement(Path(folder) / CONFIG),
            machine_of(Path(folder)),
        )
        for folder, run in unique.items()
    ], warnings


def _history(folder: Path) -> History:
    log = folder / jsonl.EVENTS
    return history(jsonl.read(log)) if os.path.lexists(log) else History()
