"""CSV tables of the step reports, the evaluations, and the metrics that a custom training loop logged.

Each metric has a column. When a run resumes, the rows of the steps that it recomputes are removed, so that no step
appears twice.
"""

import csv
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, final

from lockstep.common import plainfile
from lockstep.reporting.jsonl import to_json_fields
from lockstep.training.events import Evaluated, Event, Logged, Started, Stepped

STEPS: Final = "steps.csv"
EVALUATIONS: Final = "evaluations.csv"
LOGGED: Final = "logged.csv"
_TABLES: Final[Mapping[type, str]] = {Stepped: STEPS, Evaluated: EVALUATIONS, Logged: LOGGED}
_OMITTED_FIELDS: Final = ("event", "fractions")
_MAX_TABLE_BYTES: Final = 1 << 30  # maximum size of a table that is read when a run resumes


@final
class CsvTables:
    """An event sink that writes the tables into `folder`. Numbers are formatted as in events.jsonl.

    When `write` returns, the operating system has the row, so it isn't lost if the process is killed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._columns: dict[str, list[str]] = {}

    def write(self, event: Event, time: float) -> None:
        if isinstance(event, Started):
            for each in _TABLES.values():
                self._resume_table(each, event.step)
        if name := _TABLES.get(type(event)):
            self._append_row(
                name, {key: value for key, value in to_json_fields(event, time).items() if key not in _OMITTED_FIELDS}
            )

    def close(self) -> None:
        """Do nothing, because `write` leaves no file open."""

    def _resume_table(self, name: str, step: int) -> None:
        """Remove an incomplete last row from a table, and all rows after `step`, where the run resumes."""
        path = self._folder / name
        try:
            lines = self._read_rows(path)
        except FileNotFoundError:
            return
        if not lines:  # the process was killed while it wrote the header
            path.unlink()
            return
        self._columns[name], *rows = lines
        step_column = self._columns[name].index("step")
        self._replace_file(name, [row for row in rows if int(row[step_column]) <= step])

    def _read_rows(self, path: Path) -> list[list[str]]:
        text = plainfile.read_bytes(path, _MAX_TABLE_BYTES).decode()
        return list(csv.reader(text[: text.rfind("\n") + 1].splitlines()))

    def _replace_file(self, file_name: str, rows: Iterable[list[str]]) -> None:
        new_file = self._folder / f"{file_name}.new"
        with os.fdopen(
            plainfile.open_descriptor(new_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w", newline=""
        ) as file:
            csv.writer(file, lineterminator="\n").writerows([self._columns[file_name], *rows])
        new_file.replace(self._folder / file_name)

    def _append_row(self, file_name: str, row: Mapping[str, Any]) -> None:
        needs_header = file_name not in self._columns
        columns = self._columns.setdefault(file_name, list(row))
        path = self._folder / file_name
        if new_columns := [key for key in row if key not in columns]:
            _, *rows = self._read_rows(path)
            columns += new_columns
            self._replace_file(file_name, [each + [""] * len(new_columns) for each in rows])
        with os.fdopen(
            plainfile.open_descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "a", newline=""
        ) as file:
            writer = csv.writer(file, lineterminator="\n")
            if needs_header:
                writer.writerow(columns)
            writer.writerow([row.get(key, "") for key in columns])
