"""A survey as a table, and the best of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

from rich.table import Table
from rich.text import Text

from lockstep.common.text import printable_line
from lockstep.planning.survey import Machine, Placed

_HEADINGS: Final = ("strategy", "processes", "memory, most", "between steps", "sends", "a step", "fits")
_UNITS: Final = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def in_order(rows: Sequence[Placed], machine: Machine) -> list[Placed]:
    """Return the rows, the best first: those that are not known not to fit, by what a step takes."""
    return sorted(rows, key=lambda row: (row.figures is None, row.fits(machine) is False, row.seconds or 0.0))


def draw(rows: Sequence[Placed], machine: Machine) -> Table:
    """Return the measured rows as a table."""
    table = Table(box=None, pad_edge=False, header_style="")
    for number, heading in enumerate(_HEADINGS):
        table.add_column(heading, justify="left" if number == 0 else "right", no_wrap=True)
    for row in rows:
        if row.figures is not None:
            table.add_row(*map(Text, _cells(row, machine)))
    return table


def refused(rows: Sequence[Placed]) -> list[str]:
    """Return a line for each strategy without figures on some numbers of processes: on which, and why on the first."""
    without: dict[str, list[Placed]] = {}
    for row in rows:
        if row.figures is None:
            without.setdefault(row.strategy, []).append(row)
    return [
        printable_line(
            f"not measured: {name} on {', '.join(str(row.processes) for row in own)}: {_first(own[0].reason)}"
        )
        for name, own in without.items()
    ]


def best(rows: Sequence[Placed], machine: Machine) -> str:
    """Return the words for the first row that is not known not to fit, "" where there is none."""
    fitting = (row for row in rows if row.figures is not None and row.fits(machine) is not False)
    return next((row.words for row in fitting), "")


def to_json(rows: Sequence[Placed], machine: Machine) -> str:
    """Return all that was found."""
    content = [{**asdict(row), "fits": row.fits(machine)} for row in rows]
    return json.dumps({"machine": asdict(machine), "placements": content}, indent=1) + "\n"


def size(number: float) -> str:
    """Say a number of bytes."""
    for unit, name in _UNITS:
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number:.0f} B"


def _first(reason: str) -> str:
    return reason.strip().partition("\n")[0]


def _cells(row: Placed, machine: Machine) -> list[str]:
    figures = row.figures
    assert figures is not None
    sends = f"{size(figures.sent)}, {figures.messages}" if row.pretended else ""
    fits = {None: "", True: "yes", False: f"no, by {size(figures.peak - (machine.memory or 0))}"}[row.fits(machine)]
    step = f"{row.seconds:.3g} s"
    return [row.strategy, str(row.processes), size(figures.peak), size(figures.held), sends, step, fits]
