"""Predictions for a new table.

Its rows are converted to inputs of the model using the column statistics in the checkpoint.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from lockstep.data.tables.columns import Number, check_numbers, restore_column
from lockstep.data.tables.files import read
from lockstep.data.tables.rows import Rows
from lockstep.errors import UsageError
from lockstep.inference.pictures import Row, top_classes
from lockstep.inference.saved import Computing, SavedModel
from lockstep.tasks.batches import predictions

_OUTPUT_SUFFIXES: Final = (".csv", ".parquet")


def predict_rows(saved: SavedModel, computing: Computing, file: Path, out: Path | None = None) -> Iterator[Row]:
    """Yield the predicted class or the predicted target values of each row of a .csv or .parquet file.

    With `out`, the full table is also written to that file, with the predictions as additional columns. The table
    doesn't need columns that the run wasn't trained on.
    """
    table = read(file)
    rows = _rows(saved, table)
    if out is not None:
        if out.suffix not in _OUTPUT_SUFFIXES:
            raise UsageError(f"--out {out}: the name of a table must end in {' or '.join(_OUTPUT_SUFFIXES)}")
        if out.exists():
            raise UsageError(f"--out {out}: already exists; use a different name")
        if not out.parent.is_dir():
            raise UsageError(f"--out {out}: folder {out.parent} does not exist; create it, or use a different folder")
    task, written_rows = saved.task(), []
    for first in range(0, len(rows), computing.batch):
        numbers = np.arange(first, min(first + computing.batch, len(rows)))
        outputs = predictions(computing(task.inputs(rows.fetch(numbers, None))), saved.name).cpu()
        for number, output in zip(numbers.tolist(), outputs, strict=True):
            row = _prediction(saved, output)
            written_rows += [row] if out is not None else []
            yield {"row": number, **row}
    if out is not None:
        _write(out, table, written_rows)


def _rows(saved: SavedModel, table: Any) -> Rows:
    options: Mapping[str, Any] = saved.recipe.data.options
    columns = [restore_column(column, options.get("missing") == "mean") for column in saved.facts.columns or []]
    missing_names = [column.name for column in columns if column.name not in table.column_names]
    if missing_names:
        raise UsageError(f"table: missing columns that the run was trained on: {', '.join(missing_names)}; add them")
    for column in columns:
        if isinstance(column, Number):
            check_numbers(column.name, table[column.name], column.means)
    targets = torch.zeros(len(table), dtype=torch.int64)
    return Rows(columns, table, targets, bool(options.get("codes")))


def _prediction(saved: SavedModel, output: torch.Tensor) -> Row:
    facts = saved.facts
    if facts.classes:
        best = top_classes(output, 1)
        return {"predicted": facts.classes[best.numbers[0]], "probability": best.probabilities[0]}
    numbers = output.double().flatten().tolist()
    targets = facts.targets or []
    if len(numbers) == len(targets) > 1:
        return {f"predicted {name}": value for name, value in zip(targets, numbers, strict=True)}
    return {"predicted": numbers[0] if len(numbers) == 1 else numbers}


def _write(out: Path, table: Any, rows: list[Row]) -> None:
    from pyarrow import csv, parquet

    for name in rows[0]:
        if name in table.column_names:
            raise UsageError(f"--out {out}: the table already has a column '{name}'; rename that column")
        table = table.append_column(name, [[row[name] for row in rows]])
    write = csv.write_csv if out.suffix == ".csv" else parquet.write_table
    write(table, out)
