"""A table or JSON overview of several runs, with the settings that differ and the reasons for failures."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final, TextIO

from lockstep.reporting import wording
from lockstep.reporting.run_log import RunStatus, describe_best_run
from lockstep.reporting.run_view import STYLES, RunView, describe_endings, find_differing_keys, format_loss
from lockstep.reporting.terminal import create_table, make_console, print_unwrapped

_HEADINGS: Final = ("run", "state", "figure", "loss", "step", "job", "left", "last", "samples/s", "epoch")
_BEST_COLUMN_INDEX: Final = 3  # index of the column before which `best` is inserted
_KEY_COLUMNS_INDEX: Final = 6  # index of the column before which the differing keys are inserted
_NUMERIC_COLUMNS: Final = ("figure", "loss", "step", "left", "samples/s", "epoch")
# Maximum number of differing keys with a column; the remaining keys are listed below the table.
_MAX_KEY_COLUMNS: Final = 5
# Differing keys that get a column before others.
_FIRST_KEYS: Final = (
    "model.name",
    "data.name",
    "optimizer.name",
    "optimizer.lr.value",
    "batch",
    "placement.strategy.name",
    "placement.processes",
)
_MAX_CELL_CHARS: Final = 24  # maximum number of characters in a column of a differing key


def print_overview(runs: Sequence[RunView], now: float, stream: TextIO, terminal: bool | None = None) -> None:
    """Write a table of `runs` to `stream`, in the given order. `now` is in seconds since 1970.

    `terminal` overrides the detection of whether `stream` is a terminal. Empty columns are omitted. If the terminal is
    too narrow, the last columns are omitted too, and a line below the table lists their headings.
    """
    console = make_console(stream, terminal)
    rows = [format_cells(run, now) for run in runs]
    columns = [(heading, [row[at] for row in rows]) for at, heading in enumerate(_HEADINGS)]
    settings, keys = _collect_settings(runs)
    keys = sorted(keys, key=lambda key: _FIRST_KEYS.index(key) if key in _FIRST_KEYS else len(_FIRST_KEYS))
    headings = _shorten_keys(keys[:_MAX_KEY_COLUMNS])
    columns.insert(_BEST_COLUMN_INDEX, ("best", describe_best_run([run.history for run in runs])))
    columns[_KEY_COLUMNS_INDEX:_KEY_COLUMNS_INDEX] = [
        (headings[key], [_truncate(each.get(key, "")) for each in settings]) for key in headings
    ]
    shown = {heading: column for heading, column in columns if any(column)}
    texts = [heading for heading in shown if heading not in _NUMERIC_COLUMNS]
    print_unwrapped(console, create_table(console, shown, [STYLES.get(run.state, "red") for run in runs], texts))
    lines = [f"the runs also differ in {', '.join(keys[_MAX_KEY_COLUMNS:])}"] if keys[_MAX_KEY_COLUMNS:] else []
    for line in [*lines, *describe_endings(runs)]:
        console.print(line, soft_wrap=True)


def to_json_dicts(runs: Sequence[RunView]) -> list[dict[str, Any]]:
    """Return a JSON-compatible dict for each run."""
    settings, keys = _collect_settings(runs)
    return [
        {
            "run": run.folder,
            "state": run.state,
            **_get_status_fields(run.status),
            "job": run.job,
            "slurm": run.job_state or None,
            "failure": run.failure or None,
            "differs": {key: values.get(key) for key in keys},
        }
        for run, values in zip(runs, settings, strict=True)
    ]


def _collect_settings(runs: Sequence[RunView]) -> tuple[list[dict[str, str]], list[str]]:
    """Return a dict of recipe and placement settings for each run, and the keys that differ between runs."""
    recipes = [dict(run.recipe) for run in runs]
    placements = [{f"placement.{key}": value for key, value in run.placement.items()} for run in runs]
    merged = [placement | recipe for placement, recipe in zip(placements, recipes, strict=True)]
    return merged, [*find_differing_keys(recipes), *find_differing_keys(placements)]


def _get_status_fields(status: RunStatus) -> dict[str, Any]:
    """Return the status of a run as a JSON-compatible dict. The name of the latest evaluation metric is its key."""
    status_fields = asdict(status)
    del status_fields["figure"]
    if status.figure is not None:
        status_fields[status.figure.name] = status.figure.value
    if status.loss is not None and not math.isfinite(status.loss):
        status_fields["loss"] = str(status.loss)  # same format as in the log, because JSON has no NaN or infinity
    return status_fields


def format_cells(run: RunView, now: float) -> tuple[str, ...]:
    """Return the cells of a run, one for each of `_HEADINGS`."""
    status, figure = run.status, run.status.figure
    ended = run.state in ("done", "unreadable")
    return (
        run.name,
        run.state,
        "" if figure is None else f"{figure.name} {wording.format_value(figure.value, figure.is_fraction)}",
        format_loss(run.history),
        wording.format_fraction(status.step, status.steps),
        f"{run.job or ''} {run.job_state}".strip(),
        "" if ended or status.left_s is None else wording.format_duration(status.left_s),
        "" if status.time is None else format_age(now - status.time),
        "" if status.samples_per_s is None else f"{status.samples_per_s:,.0f}",
        wording.format_fraction(status.epoch, status.epochs),
    )


def format_age(seconds: float) -> str:
    """Format a duration as text, such as `5 min ago`. A negative duration, due to clock skew, counts as 0."""
    for unit, name in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= unit:
            return f"{seconds / unit:.0f} {name} ago"
    return f"{max(seconds, 0):.0f} s ago"


def _shorten_keys(keys: Sequence[str]) -> dict[str, str]:
    """Return each key's heading: its last part, such as `lr` for optimizer.lr.value, or the full key if ambiguous."""
    short = {key: key.removesuffix(".value").removesuffix(".name").rpartition(".")[2] for key in keys}
    taken = [*_HEADINGS, *short.values()]
    return {key: name if taken.count(name) == 1 else key for key, name in short.items()}


def _truncate(text: str) -> str:
    return text if len(text) <= _MAX_CELL_CHARS else f"{text[: _MAX_CELL_CHARS - 1]}…"
