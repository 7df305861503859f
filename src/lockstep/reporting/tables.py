"""steps.csv and evaluations.csv: the reports and the evaluations of a run as tables, a column for each figure.

A run that goes on takes back the rows of steps that it does again, so that each step stands there once.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, final

from lockstep import plainfile
from lockstep.reporting.jsonl import figures
from lockstep.training.events import Evaluated, Event, Started, Stepped

STEPS: Final = "steps.csv"
EVALUATIONS: Final = "evaluations.csv"
_LEFT_OUT: Final = ("event", "fractions")
_LARGEST: Final = 1 << 30  # bytes of a table that is read to go on with it


@final
class Tables:
    """Writes both tables into `folder`; a row is with the kernel at once. Numbers are those of events.jsonl."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._columns: dict[str, list[str]] = {}

    def write(self, event: Event, time: float) -> None:
        if isinstance(event, Started):
            for name in (STEPS, EVALUATIONS):
                self._take_up(name, event.step)
        if isinstance(event, Stepped | Evaluated):
            row = {key: value for key, value in figures(event, time).items() if key not in _LEFT_OUT}
            self._append(STEPS if isinstance(event, Stepped) else EVALUATIONS, row)

    def close(self) -> None:
        """Do nothing: each event leaves the files whole."""

    def _take_up(self, name: str, step: int) -> None:
        """Keep the rows up to `step` of a table that an earlier start has left; half a row at its end is none."""
        path = self._folder / name
        try:
            text = plainfile.content(path, _LARGEST).decode()
        except FileNotFoundError:
            return
        lines = list(csv.reader(text[: text.rfind("\n") + 1].splitlines()))
        if not lines:  # killed in its first row
            path.unlink()
            return
        header, *rows = lines
        at = header.index("step")
        self._columns[name] = header
        fresh = path.with_name(f"{name}.new")
        with os.fdopen(plainfile.descriptor(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([header, *(row for row in rows if int(row[at]) <= step)])
        fresh.replace(path)

    def _append(self, name: str, row: Mapping[str, Any]) -> None:
        header = name not in self._columns
        columns = self._columns.setdefault(name, list(row))
        if more := [key for key in row if key not in columns]:
            raise ValueError(f"{self._folder / name} has no column for {', '.join(more)}; move it away")
        path = self._folder / name
        with os.fdopen(plainfile.descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "a", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            if header:
                writer.writerow(columns)
            writer.writerow([row.get(key, "") for key in columns])
