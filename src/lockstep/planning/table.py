"""Formats the results of a survey as a table or as JSON, and selects the best placement."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

from rich.table import Table
from rich.text import Text

from lockstep.common.text import format_bytes, printable_line
from lockstep.planning.survey import Machine, PlacementEstimate

_HEADINGS: Final = ("strategy", "processes", "peak memory", "between steps", "sends", "a step", "fits")
_COST_HEADINGS: Final = {"epoch": "an epoch", "run": "the run", "save_every": "save every, steps", "kept": "kept"}


def sort_rows(rows: Sequence[PlacementEstimate], machine: Machine) -> list[PlacementEstimate]:
    """Return the placements in order of step time. Those that don't fit into memory or weren't measured come last."""
    return sorted(rows, key=lambda row: (row.figures is None, row.fits(machine) is False, row.seconds or 0.0))


def make_table(rows: Sequence[PlacementEstimate], machine: Machine) -> Table:
    """Return a table of the measured placements."""
    table = Table(box=None, pad_edge=False, header_style="")
    measured_rows = [row for row in rows if row.figures is not None]
    cost_keys = [key for key in _COST_HEADINGS if any(getattr(row.costs, key) is not None for row in measured_rows)]
    for number, heading in enumerate([*_HEADINGS, *(_COST_HEADINGS[key] for key in cost_keys)]):
        table.add_column(heading, justify="left" if number == 0 else "right", no_wrap=True)
    for row in measured_rows:
        costs = [_format_cost(key, getattr(row.costs, key)) for key in cost_keys]
        table.add_row(*map(Text, [*_format_cells(row, machine), *costs]))
    return table


def format_unmeasured_placements(rows: Sequence[PlacementEstimate]) -> list[str]:
    """Return a line for each strategy that couldn't be measured on all requested numbers of processes.

    The line lists the numbers of processes without measurements, and the reason for the first of them.
    """
    unmeasured: dict[str, list[PlacementEstimate]] = {}
    for row in rows:
        if row.figures is None:
            unmeasured.setdefault(row.strategy, []).append(row)
    lines = []
    for name, strategy_rows in unmeasured.items():
        numbers = ", ".join(str(row.processes) for row in strategy_rows)
        lines.append(printable_line(f"not measured: {name} on {numbers}: {_get_first_line(strategy_rows[0].reason)}"))
    return lines


def find_best(rows: Sequence[PlacementEstimate], machine: Machine) -> PlacementEstimate | None:
    """Return the first measured placement that fits into memory, as far as this is known, or None if there is none."""
    return next((row for row in rows if row.figures is not None and row.fits(machine) is not False), None)


def to_json(rows: Sequence[PlacementEstimate], machine: Machine) -> str:
    """Return the full survey as JSON."""
    content = [{**asdict(row), "fits": row.fits(machine)} for row in rows]
    return json.dumps({"machine": asdict(machine), "placements": content}, indent=1) + "\n"


def _get_first_line(reason: str) -> str:
    return reason.strip().partition("\n")[0]


def _format_cost(cost_name: str, value: float) -> str:
    if cost_name == "kept":
        return f"{100 * value:.2f} %"
    return f"{value:,.0f}" if value >= 100 or cost_name == "save_every" else f"{value:.3g}"


def _format_cells(row: PlacementEstimate, machine: Machine) -> list[str]:
    figures = row.figures
    assert figures is not None
    has_messages = figures.messages or row.processes == 1  # messages are only counted with simulated peers
    sends = f"{format_bytes(figures.sent)}, {figures.messages}" if has_messages else ""
    fits = {None: "", True: "yes", False: f"no, by {format_bytes(figures.peak - (machine.memory or 0))}"}[
        row.fits(machine)
    ]
    step = f"{row.seconds:.3g} s"
    return [row.strategy, str(row.processes), format_bytes(figures.peak), format_bytes(figures.held), sends, step, fits]
