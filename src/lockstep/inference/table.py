"""Predictions for the rows of a new table.

Rows are converted to model inputs using the column statistics in the checkpoint.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from lockstep.data.tables.columns import NumericColumn, check_numeric_column, restore_column
from lockstep.data.tables.files import read_table
from lockstep.data.tables.rows import TableSplit
from lockstep.errors import UsageError
from lockstep.inference.images import Row, get_top_classes
from lockstep.inference.saved import EvaluationModel, SavedModel
from lockstep.tasks.batches import get_predictions

_OUTPUT_SUFFIXES: Final = (".csv", ".parquet")


def predict_rows(saved: SavedModel, model: EvaluationModel, file: Path, out: Path | None = None) -> Iterator[Row]:
    """Yield the predicted class or the predicted target values for each row of a .csv or .parquet file.

    If `out` is set, the table is also written to that file, with the predictions as additional columns. The table must
    contain the columns that the run was trained on. Other columns are ignored.
    """
    table = read_table(file)
    rows = _convert_table(saved, table)
    if out is not None:
        if out.suffix not in _OUTPUT_SUFFIXES:
            raise UsageError(f"--out {out}: the name of a table must end in {' or '.join(_OUTPUT_SUFFIXES)}")
        if out.exists():
            raise UsageError(f"--out {out}: already exists; use a different name")
        if not out.parent.is_dir():
            raise UsageError(f"--out {out}: folder {out.parent} does not exist; create it, or use a different folder")
    task, written_rows = saved.find_task(), []
    for first in range(0, len(rows), model.batch_size):
        numbers = np.arange(first, min(first + model.batch_size, len(rows)))
        outputs = get_predictions(model(task.inputs(rows.fetch(numbers, None))), saved.name).cpu()
        for number, output in zip(numbers.tolist(), outputs, strict=True):
            row = _make_prediction_row(saved, output)
            written_rows += [row] if out is not None else []
            yield {"row": number, **row}
    if out is not None:
        _write_table(out, table, written_rows)


def _convert_table(saved: SavedModel, table: Any) -> TableSplit:
    options: Mapping[str, Any] = saved.recipe.data.options
    columns = [restore_column(column, options.get("missing") == "mean") for column in saved.dataset_info.columns or []]
    missing_names = [column.name for column in columns if column.name not in table.column_names]
    if missing_names:
        raise UsageError(f"table: missing columns that the run was trained on: {', '.join(missing_names)}; add them")
    for column in columns:
        if isinstance(column, NumericColumn):
            check_numeric_column(column.name, table[column.name], column.fill_missing)
    targets = torch.zeros(len(table), dtype=torch.int64)
    return TableSplit(columns, table, targets, bool(options.get("codes")))


def _make_prediction_row(saved: SavedModel, output: torch.Tensor) -> Row:
    facts = saved.dataset_info
    if facts.classes:
        best = get_top_classes(output, 1)
        return {"predicted": facts.classes[best.class_indices[0]], "probability": best.probabilities[0]}
    numbers = output.double().flatten().tolist()
    targets = facts.targets or []
    if len(numbers) == len(targets) > 1:
        return {f"predicted {name}": value for name, value in zip(targets, numbers, strict=True)}
    return {"predicted": numbers[0] if len(numbers) == 1 else numbers}


def _write_table(out: Path, table: Any, rows: list[Row]) -> None:
    from pyarrow import csv, parquet

    for name in rows[0]:
        if name in table.column_names:
            raise UsageError(f"--out {out}: the table already has a column '{name}'; rename that column")
        table = table.append_column(name, [[row[name] for row in rows]])
    write = csv.write_csv if out.suffix == ".csv" else parquet.write_table
    write(table, out)
