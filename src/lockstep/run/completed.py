"""Whether the requested run is already complete, with its hash. Quick: no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.config.base import values
from lockstep.config.load import Loaded, comparable, read_run_recipe
from lockstep.errors import UsageError
from lockstep.reporting import jsonl, wording
from lockstep.run.runs import CONFIG


def completion_notice(loaded: Loaded) -> str:
    """Return the notice that the run folder holds this very run, trained to its end; empty where it does not.

    What must be refused, such as a folder that holds a run of another recipe, is left to the start.
    """
    run = loaded.config.run
    if run.dir is None or run.resume != "auto" or run.key_file is not None:  # the log is not signed
        return ""
    folder = Path(run.dir)
    try:
        end = jsonl.last(folder / jsonl.EVENTS)
        if end.get("event") != "done":
            return ""
        before = read_run_recipe(folder / CONFIG)
    except (OSError, UsageError):
        return ""
    same = comparable(values(before)) == comparable(values(loaded.config.recipe))
    return _words(folder, end) if same else ""


def _words(folder: Path, end: Mapping[str, Any]) -> str:
    sha256, steps = end.get("weights_sha256"), end.get("step")
    if not isinstance(sha256, str) or not re.fullmatch("[0-9a-f]{64}", sha256) or type(steps) is not int:
        return ""
    return (
        f"{folder}: already done, {steps:,} steps; to train again choose another run.dir\n{wording.hash_line(sha256)}"
    )
