"""Whether the requested run is already complete, with its hash. Quick: no torch."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from lockstep.config.base import values
from lockstep.config.load import Loaded, comparable, read_run_recipe
from lockstep.config.recorded import CONFIG
from lockstep.errors import UsageError
from lockstep.reporting import jsonl, wording
from lockstep.training.events import Done

_FIELDS: Final = {"time", *Done.__dataclass_fields__}  # of a line of the log; what is not among them are figures
_BEST: Final = "best_"


def completion_notice(loaded: Loaded) -> str:
    """Return the notice that the run folder holds this very run, trained to its end; empty where it does not."""
    done = completed(loaded)
    if done is None:
        return ""
    steps, line = f"{done.step:,} steps", wording.hash_line(done.weights_sha256)
    return f"{loaded.config.run.dir}: already done, {steps}; to train again choose another run.dir\n{line}"


def completed(loaded: Loaded) -> Done | None:
    """Return how the run folder's run ended, if it is this very run, trained to its end; None where it is not.

    What must be refused, such as a folder that holds a run of another recipe, is left to the start.
    """
    run = loaded.config.run
    if run.dir is None or run.resume != "auto" or run.key_file is not None:  # the log is not signed
        return None
    folder = Path(run.dir)
    try:
        end = jsonl.last(folder / jsonl.EVENTS)
        if end.get("event") != "done":
            return None
        before = read_run_recipe(folder / CONFIG)
    except (OSError, UsageError):
        return None
    return _done(end) if comparable(values(before)) == comparable(values(loaded.config.recipe)) else None


def _done(end: Mapping[str, Any]) -> Done | None:
    """Return the event that a line of the log is, but for what each rank took; None where it is damaged."""
    sha256 = end.get("weights_sha256")
    at: dict[str, Any] = {name: end.get(name) for name in ("step", "epoch", "samples")}
    if not isinstance(sha256, str) or not re.fullmatch("[0-9a-f]{64}", sha256) or {*map(type, at.values())} != {int}:
        return None
    numbers: dict[str, Any] = {name: value for name, value in end.items() if type(value) in (int, float)}
    known = {name: numbers[name] for name in ("skipped_steps", "skipped_samples", "seconds") if name in numbers}
    others = {name: value for name, value in numbers.items() if name not in _FIELDS}
    best = {name.removeprefix(_BEST): value for name, value in others.items() if name.startswith(_BEST)}
    figures = {name: value for name, value in others.items() if not name.startswith(_BEST)}
    return Done(**at, **known, weights_sha256=sha256, figures=figures, best=best)
