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

_HEADINGS: Final = ("strategy", "processes", "memory, most", "between steps", "computes", "sends", "a step", "fits")
_UNITS: Final = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def in_order(rows: Sequence[Placed], machine: Machine) -> list[Placed]:
    """Return the rows, the best first: those that fit by what a step takes at most, as far as that is known."""

    def place(row: Placed) -> tuple[bool, bool, float]:
        seconds = row.seconds(machine)
        return row.figures is None, row.fits(machine) is False, (seconds[1] or seconds[0]) if seconds else 0.0

    return sorted(rows, key=place)


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
    content = [{**asdict(row), "step_s": row.seconds(machine), "fits": row.fits(machine)} for row in rows]
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
    figures, seconds = row.figures, row.seconds(machine)
    assert figures is not None
    assert seconds is not None
    sends = f"{size(figures.sent)}, {figures.messages}" if row.pretended else ""
    least, most = seconds
    step = (
        f"{least:.3g} s" if most == least else f"from {least:.3g} s" if most is None else f"{least:.3g} to {most:.3g} s"
    )
    fits = {None: "", True: "yes", False: f"no, by {size(figures.peak - (machine.memory or 0))}"}[row.fits(machine)]
    computes = f"{figures.seconds:.3g} s" if row.pretended else ""
    return [row.strategy, str(row.processes), size(figures.peak), size(figures.held), computes, sends, step, fits]
