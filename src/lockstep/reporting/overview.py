"""Several runs at a glance: a line for each, in what their recipes differ, and why some failed; as JSON too."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final, TextIO

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from lockstep.reporting import wording
from lockstep.reporting.run_log import RunStatus
from lockstep.reporting.run_view import NO_REASON, STYLES, RunView, differing
from lockstep.reporting.terminal import terminal_on

_HEADINGS: Final = ("run", "state", "step", "epoch", "samples/s", "left", "loss", "figure", "last", "job")
_NUMBERS: Final = ("step", "epoch", "samples/s", "left", "loss", "figure")
_LEFT_OUT: Final = ("epoch", "figure", "samples/s", "loss", "last")  # one after the other, where a terminal is narrow
_GAP: Final = "  "
_MOST_NAMES: Final = 5  # of runs that ended alike, in one line
_MOST_KEYS: Final = 5  # in which recipes differ, as columns; the others are named below the table
_WIDEST: Final = 24  # of such a column
_ANY_WIDTH: Final = 1 << 16  # of a table whose columns are chosen: folded cells could not be read


def overview(runs: Sequence[RunView], now: float, stream: TextIO, terminal: bool | None = None) -> None:
    """Write a table of the runs, in their order; `now` is in seconds since 1970. Without `terminal` the stream decides.

    Columns in which nothing stands are left out; so are some, and it is said, where a terminal is too narrow.
    """
    console = terminal_on(stream, terminal)
    rows = [cells(run, now) for run in runs]
    columns = [(heading, [row[at] for row in rows]) for at, heading in enumerate(_HEADINGS)]
    settings, keys = _settings(runs)
    headings = _headings(keys[:_MOST_KEYS])
    columns[2:2] = [(headings[key], [_cut(each.get(key, "")) for each in settings]) for key in headings]
    shown = {heading: column for heading, column in columns if any(column)}
    left_out = _drop_columns(shown, console.width, [*headings.values()]) if console.is_terminal else []
    table = Table(box=None, pad_edge=False, padding=(0, len(_GAP), 0, 0), header_style="bold")
    for heading in shown:
        table.add_column(heading, justify="right" if heading in _NUMBERS else "left", no_wrap=True)
    for number, run in enumerate(runs):
        styles = {"state": STYLES.get(run.state, "")}
        table.add_row(*(Text(column[number], styles.get(heading, "")) for heading, column in shown.items()))
    console.width = _ANY_WIDTH
    with console.capture() as drawn:
        console.print(table)
    stream.writelines(f"{line.rstrip()}\n" for line in drawn.get().splitlines())
    lines = [f"left out, for want of room: {', '.join(left_out)}"] if left_out else []
    lines += [f"they also differ in {', '.join(keys[_MOST_KEYS:])}"] if keys[_MOST_KEYS:] else []
    lines += [f"{run.name} failed: {run.failure}" for run in runs if run.failure]
    if silent := [run.name for run in runs if run.state == "died" and not run.failure]:
        more = f" and {len(silent) - _MOST_NAMES:,} more" if len(silent) > _MOST_NAMES else ""
        lines.append(f"{', '.join(silent[:_MOST_NAMES])}{more} {NO_REASON}")
    for line in lines:
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
        wording.of(status.step, status.steps),
        wording.of(status.epoch, status.epochs),
        "" if status.samples_per_s is None else f"{status.samples_per_s:,.0f}",
        "" if ended or status.left_s is None else wording.duration(status.left_s),
        "" if status.loss is None else wording.loss(status.loss),
        "" if figure is None else f"{figure.name} {wording.figure(figure.value, figure.is_fraction)}",
        "" if status.time is None else ago(now - status.time),
        f"{run.job or ''} {run.queued}".strip(),
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


def _drop_columns(columns: dict[str, list[str]], width: int, of_keys: Sequence[str]) -> list[str]:
    """Take columns away until the rest fits, and return the headings of those; those of keys go last."""
    taken = []
    for heading in (*_LEFT_OUT, *reversed(of_keys)):
        if sum(max(map(cell_len, (each, *cells))) + len(_GAP) for each, cells in columns.items()) - len(_GAP) <= width:
            break
        if columns.pop(heading, None) is not None:
            taken.append(heading)
    return taken
