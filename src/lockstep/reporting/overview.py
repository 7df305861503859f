"""Several runs at a glance: a line for each, in what their recipes differ, and why some failed; as JSON too."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from lockstep.common.text import printable_line
from lockstep.reporting import wording
from lockstep.reporting.status import Figure, State, Status

_STYLES: Final = {"running": "green", "died": "red", "unreadable": "red", "queued": "yellow", "saved": "cyan"}
_HEADINGS: Final = ("run", "state", "step", "epoch", "samples/s", "left", "loss", "figure", "last", "job")
_NUMBERS: Final = ("step", "epoch", "samples/s", "left", "loss", "figure")
_LEFT_OUT: Final = ("epoch", "figure", "samples/s", "loss", "last")  # one after the other, where a terminal is narrow
_GAP: Final = "  "
_MOST_NAMES: Final = 5  # of runs that ended alike, in one line
NO_REASON: Final = "ended without a reason, as SIGKILL or the loss of a host leaves it; see logs/ in the run folder"
_MOST_KEYS: Final = 5  # in which recipes differ, as columns; the others are named below the table
_WIDEST: Final = 24  # of such a column


@dataclass(frozen=True)
class Run:
    """A run folder, what is known of it, and the number of its last job, with its state in Slurm's queue, in words.

    `recipe` has the values of its recipe as text, by their dotted keys, and `placement` those that the last start had;
    they are empty where nobody knows. `failure` is why the last start failed, if it did.
    """

    folder: str
    state: State
    status: Status
    job: int | None = None
    queued: str = ""
    recipe: Mapping[str, str] = field(default_factory=dict)
    failure: str = ""
    placement: Mapping[str, str] = field(default_factory=dict)


def overview(runs: Sequence[Run], now: float, stream: TextIO, terminal: bool | None = None) -> None:
    """Write a table of the runs, in their order; `now` is in seconds since 1970. `terminal` left out, it is asked.

    Columns in which nothing stands are left out; so are some, and it is said, where a terminal is too narrow.
    """
    terminal = stream.isatty() if terminal is None else terminal
    console = Console(file=stream, force_terminal=terminal, highlight=False, markup=False, emoji=False)
    rows = [cells(run, now) for run in runs]
    columns = [_Column(heading, [row[at] for row in rows]) for at, heading in enumerate(_HEADINGS)]
    settings = [{**_placed(run.placement), **run.recipe} for run in runs]
    keys = [*differing(runs), *_differing([_placed(run.placement) for run in runs])]
    columns[2:2] = _columns(settings, keys[:_MOST_KEYS])
    shown = [column for column in columns if any(column.cells)]
    left_out = _narrowed(shown, console.width, keys[:_MOST_KEYS]) if terminal else []
    console.print(_line(shown, None, "bold"), soft_wrap=True)
    for number, run in enumerate(runs):
        console.print(_line(shown, number, _STYLES.get(run.state, "")), soft_wrap=True)
    if left_out:
        console.print(f"left out, for want of room: {', '.join(left_out)}", soft_wrap=True)
    if keys[_MOST_KEYS:]:
        console.print(f"they also differ in {', '.join(keys[_MOST_KEYS:])}", soft_wrap=True)
    for run in runs:
        if run.failure:
            console.print(f"{printable_line(run.folder)} failed: {run.failure}", soft_wrap=True)
    if silent := [printable_line(run.folder) for run in runs if run.state == "died" and not run.failure]:
        more = f" and {len(silent) - _MOST_NAMES:,} more" if len(silent) > _MOST_NAMES else ""
        console.print(f"{', '.join(silent[:_MOST_NAMES])}{more} {NO_REASON}", soft_wrap=True)


def differing(runs: Sequence[Run]) -> list[str]:
    """Return the keys in which the recipes differ that are known, in their order."""
    return _differing([run.recipe for run in runs])


def _differing(sections: Sequence[Mapping[str, str]]) -> list[str]:
    known = [each for each in sections if each]
    keys = dict.fromkeys(key for each in known for key in each)
    return [key for key in keys if len({each.get(key) for each in known}) > 1]


def _placed(placement: Mapping[str, str]) -> dict[str, str]:
    """Return the keys of a placement apart from those of a recipe."""
    return {f"placement.{key}": value for key, value in placement.items()}


def for_json(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return an object for each run, ready for JSON."""
    keys, placed = differing(runs), _differing([_placed(run.placement) for run in runs])
    return [
        {
            "run": run.folder,
            "state": run.state,
            **_figures(run.status),
            "job": run.job,
            "slurm": run.queued or None,
            "failure": run.failure or None,
            "differs": {
                **{key: run.recipe.get(key) for key in keys},
                **{key: _placed(run.placement).get(key) for key in placed},
            },
        }
        for run in runs
    ]


def _figures(status: Status) -> dict[str, Any]:
    """Return what an event log holds, the figure of the last evaluation by its name."""
    figures = asdict(replace(status, figure=None))
    del figures["figure"]
    if status.figure is not None:
        figures[status.figure.name] = status.figure.value
    if status.loss is not None and not math.isfinite(status.loss):
        figures["loss"] = str(status.loss)  # as in the log: JSON has no NaN and no infinity
    return figures


def cells(run: Run, now: float) -> tuple[str, ...]:
    """Return the words for one run, in the order of the headings."""
    status = run.status
    going = run.state not in ("done", "unreadable")
    return (
        printable_line(run.folder),
        run.state,
        _of(status.step, status.steps),
        _of(status.epoch, status.epochs),
        "" if status.samples_per_s is None else f"{status.samples_per_s:,.0f}",
        wording.duration(status.left_s) if going and status.left_s is not None else "",
        "" if status.loss is None else f"{status.loss:.4f}",
        "" if status.figure is None else _figure(status.figure),
        "" if status.time is None else ago(now - status.time),
        f"{run.job or ''} {run.queued}".strip(),
    )


def _figure(figure: Figure) -> str:
    return f"{figure.name} {wording.figure(figure.value, figure.is_fraction)}"


def ago(seconds: float) -> str:
    """Say how long ago something was; clocks of hosts that differ make it no less than now."""
    for unit, name in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= unit:
            return f"{seconds / unit:.0f} {name} ago"
    return f"{max(seconds, 0):.0f} s ago"


@dataclass(frozen=True)
class _Column:
    heading: str
    cells: list[str]

    @property
    def width(self) -> int:
        return max(map(cell_len, (self.heading, *self.cells)))

    def padded(self, number: int | None) -> str:
        """Return the cell of a line, or the heading, as wide as the column."""
        text = self.heading if number is None else self.cells[number]
        space = " " * (self.width - cell_len(text))
        return space + text if self.heading in _NUMBERS else text + space


def _columns(settings: Sequence[Mapping[str, str]], keys: Sequence[str]) -> list[_Column]:
    """Return a column for each key of recipes and placements."""
    headings = _headings(keys)
    return [_Column(headings[key], [_cut(each.get(key, "")) for each in settings]) for key in keys]


def _headings(keys: Sequence[str]) -> dict[str, str]:
    """Return short names of keys: `lr` of optimizer.lr.value; the whole key where two would be alike."""
    short = {key: key.removesuffix(".value").removesuffix(".name").rpartition(".")[2] for key in keys}
    taken = [*_HEADINGS, *short.values()]
    return {key: name if taken.count(name) == 1 else key for key, name in short.items()}


def _cut(text: str) -> str:
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 1]}…"


def _narrowed(columns: list[_Column], width: int, keys: Sequence[str]) -> list[str]:
    """Take columns away until the rest fits, and return the headings of those; those of `keys` go last."""
    taken = []
    for heading in (*_LEFT_OUT, *reversed(_headings(keys).values())):
        if sum(column.width + len(_GAP) for column in columns) - len(_GAP) <= width:
            break
        found = [column for column in columns if column.heading == heading]
        taken += [heading] * len(found)
        columns[:] = [column for column in columns if column not in found]
    return taken


def _line(columns: Sequence[_Column], number: int | None, style: str) -> Text:
    """Return a line of the table, or its head, of which `style` is the style: of a line, of its state."""
    text = Text()
    for column in columns:
        plain = number is not None and column.heading != "state"
        text.append(column.padded(number), "" if plain else style)
        text.append(_GAP)
    text.rstrip()
    return text


def _of(number: int | None, total: int | None) -> str:
    return "" if number is None else f"{number:,}" if total is None else f"{number:,}/{total:,}"
