"""Detects whether a run is already complete. This module doesn't import torch, so that it is fast."""

import re
from collections.abc import Mapping
from typing import Any, Final

from lockstep.common.location import get_local_folder, is_url
from lockstep.config.base import section_to_dict
from lockstep.config.load import LoadedConfig, read_run_recipe, select_comparable_values
from lockstep.config.recorded import CONFIG_NAME
from lockstep.errors import UsageError
from lockstep.reporting import jsonl, wording
from lockstep.training.events import Done

_FIELDS: Final = {"time", *Done.__dataclass_fields__}  # known fields of a log line; all other fields are metrics
_BEST: Final = "best_"


def make_completion_notice(loaded: LoadedConfig, *, is_claimed: bool = False) -> str:
    """Return a notice with the hash of the weights if the run is already complete. Otherwise, return an empty string.

    If `run.dir` is a URL, the folder is only read if `is_claimed` is set, because its local copy may be outdated until
    this process claims the folder.
    """
    done = find_completed_run(loaded, is_claimed=is_claimed)
    if done is None:
        return ""
    steps, line = f"{done.step:,} steps", wording.format_hash_line(done.weights_sha256)
    return f"{loaded.config.run.dir}: already done, {steps}; to train again, choose a different run.dir\n{line}"


def find_completed_run(loaded: LoadedConfig, *, is_claimed: bool = False) -> Done | None:
    """Return the Done event of the run folder if it contains a complete run of this recipe. Otherwise, return None.

    Problems such as a folder with a run of a different recipe aren't reported here, but when the run starts.
    """
    run = loaded.config.run
    if run.dir is None or run.resume != "auto" or run.key_file is not None:  # with a key, the log is untrusted
        return None
    if is_url(run.dir) and not is_claimed:
        return None
    folder = get_local_folder(run.dir)
    try:
        last_event = jsonl.read_last_event(folder / jsonl.EVENTS)
        if last_event.get("event") != "done":
            return None
        recorded_recipe = read_run_recipe(folder / CONFIG_NAME)
    except (OSError, UsageError):
        return None
    return (
        _parse_done(last_event)
        if select_comparable_values(section_to_dict(recorded_recipe))
        == select_comparable_values(section_to_dict(loaded.config.recipe))
        else None
    )


def _parse_done(record: Mapping[str, Any]) -> Done | None:
    """Return the Done event that a log record contains, without per-rank fields, or None if the record is damaged."""
    sha256 = record.get("weights_sha256")
    progress: dict[str, Any] = {name: record.get(name) for name in ("step", "epoch", "samples")}
    if (
        not isinstance(sha256, str)
        or not re.fullmatch("[0-9a-f]{64}", sha256)
        or {*map(type, progress.values())} != {int}
    ):
        return None
    numbers: dict[str, Any] = {name: value for name, value in record.items() if type(value) in (int, float)}
    counts = {name: numbers[name] for name in ("skipped_steps", "skipped_samples", "seconds") if name in numbers}
    extras = {name: value for name, value in numbers.items() if name not in _FIELDS}
    best = {name.removeprefix(_BEST): value for name, value in extras.items() if name.startswith(_BEST)}
    figures = {name: value for name, value in extras.items() if not name.startswith(_BEST)}
    return Done(**progress, **counts, weights_sha256=sha256, figures=figures, best=best)
