"""Several runs at a glance: a line for each, in what their recipes differ, and why some failed; as JSON too."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final, TextIO

from lockstep.reporting import wording
from lockstep.reporting.run_log import RunStatus, best
from lockstep.reporting.run_view import STYLES, RunView, differing, endings, loss
from lockstep.reporting.terminal import print_unfolded, table, terminal_on

_HEADINGS: Final = ("run", "state", "figure", "loss", "step", "job", "left", "last", "samples/s", "epoch")
_BEST_AT: Final = 3  # of these, of which the most important stand first
_KEYS_AT: Final = 6  # keys in which recipes differ
_NUMBERS: Final = ("figure", "loss", "step", "left", "samples/s", "epoch")
_MOST_KEYS: Final = 5  # in which recipes differ, as columns; the others are named below the table
_WIDEST: Final = 24  # of such a column


def overview(runs: Sequence[RunView], now: float, stream: TextIO, terminal: bool | None = None) -> None:
    """Write a table of the runs, in their order; `now` is in seconds since 1970. Without `terminal` the stream decides.

    Columns in which nothing stands are left out; so are some, and it is said, where a terminal is too narrow.
    """
    console = terminal_on(stream, terminal)
    rows = [cells(run, now) for run in runs]
    columns = [(heading, [row[at] for row in rows]) for at, heading in enumerate(_HEADINGS)]
    settings, keys = _settings(runs)
    headings = _headings(keys[:_MOST_KEYS])
    columns.insert(_BEST_AT, ("best", best([run.history for run in runs])))
    columns[_KEYS_AT:_KEYS_AT] = [(headings[key], [_cut(each.get(key, "")) for each in settings]) for key in headings]
    shown = {heading: column for heading, column in columns if any(column)}
    texts = [heading for heading in shown if heading not in _NUMBERS]
    print_unfolded(console, table(console, shown, [STYLES.get(run.state, "red") for run in runs], texts))
    lines = [f"they also differ in {', '.join(keys[_MOST_KEYS:])}"] if keys[_MOST_KEYS:] else []
    for line in [*lines, *endings(runs)]:
        console.print(line, soft_wrap=True)


def for_json(runs: Sequence[RunView]) -> list[dict[str, Any]]:
    """Return an object for each run, ready for JSON."""
    settings, keys = _settings(runs)
    return [
        {
            "run": run.folder,
            "state": run.state,
            **_figures(run.status),
            "job": run.job,
            "slurm": run.queued or None,
            "failure": run.failure or None,
            "differs": {key: known.get(key) for key in keys},
        }
        for run, known in zip(runs, settings, strict=True)
    ]


def _settings(runs: Sequence[RunView]) -> tuple[list[dict[str, str]], list[str]]:
    """Return the keys and values of each run's recipe and placement, and the keys in which they differ."""
    recipes = [dict(run.recipe) for run in runs]
    placements = [{f"placement.{key}": value for key, value in run.placement.items()} for run in runs]
    merged = [placement | recipe for placement, recipe in zip(placements, recipes, strict=True)]
    return merged, [*differing(recipes), *differing(placements)]


def _figures(status: RunStatus) -> dict[str, Any]:
    """Return what an event log holds, the figure of the last evaluation by its name."""
    figures = asdict(status)
    del figures["figure"]
    if status.figure is not None:
        figures[status.figure.name] = status.figure.value
    if status.loss is not None and not math.isfinite(status.loss):
        figures["loss"] = str(status.loss)  # as in the log: JSON has no NaN and no infinity
    return figures


def cells(run: RunView, now: float) -> tuple[str, ...]:
    """Return the words for one run, in the order of the headings."""
    status, figure = run.status, run.status.figure
    ended = run.state in ("done", "unreadable")
    return (
        run.name,
        run.state,
        "" if figure is None else f"{figure.name} {wording.figure(figure.value, figure.is_fraction)}",
        loss(run.history),
        wording.of(status.step, status.steps),
        f"{run.job or ''} {run.queued}".strip(),
        "" if ended or status.left_s is None else wording.duration(status.left_s),
        "" if status.time is None else ago(now - status.time),
        "" if status.samples_per_s is None else f"{status.samples_per_s:,.0f}",
        wording.of(status.epoch, status.epochs),
    )


def ago(seconds: float) -> str:
    """Say how long ago something was; clocks of hosts that differ make it no less than now."""
    for unit, name in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= unit:
            return f"{seconds / unit:.0f} {name} ago"
    return f"{max(seconds, 0):.0f} s ago"


def _headings(keys: Sequence[str]) -> dict[str, str]:
    """Return short names of keys: `lr` of optimizer.lr.value; the whole key where two would be alike."""
    short = {key: key.removesuffix(".value").removesuffix(".name").rpartition(".")[2] for key in keys}
    taken = [*_HEADINGS, *short.values()]
    return {key: name if taken.count(name) == 1 else key for key, name in short.items()}


def _cut(text: str) -> str:
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 1]}…"
