"""Datasets from a CSV or Parquet file, with standardized numbers, encoded categories, and one or more targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from lockstep.common.names import format_choices
from lockstep.data.base import DataSet
from lockstep.data.options import Fraction, Names, Text
from lockstep.data.request import DataRequest
from lockstep.data.tables.columns import check_input_column, fit_column, get_column_kind, reject_mixed_column
from lockstep.data.tables.files import read_table, select_same_columns
from lockstep.data.tables.rows import TableSplit
from lockstep.data.validation_split import get_validation_fraction, make_held_out_mask
from lockstep.errors import UsageError
from lockstep.tasks.classification import compute_skip_mask

if TYPE_CHECKING:
    import pyarrow

# Integer targets with more distinct values than this require options.kind. The second limit applies if there are fewer
# than ten rows per value on average.
_MAX_CLASSES: Final = 1000
_MAX_SPARSE_CLASSES: Final = 20


@dataclass(frozen=True)
class Options:
    """The target of a table, and how its columns are used.

    - `target`: The target column, or a list of columns for regression.
    - `kind`: Defaults to regression for floats and for several targets, and to classification otherwise. You must set
      `kind` if the target has many distinct integers, or integers with gaps.
    - `categories`: The integer columns that are categories and not amounts. Text columns are always categories.
    - `ignore`: The columns to ignore.
    - `missing`: If "refuse", missing numbers raise an error. If "mean", they are replaced with the mean of the training
      split.
    - `codes`: If False, categories are one-hot encoded and appended to the numbers. If True, they are integer codes in
      a separate input.
    - `validation`: The fraction of rows for validation if there is no validation file. Defaults to 0.1. 0 means no
      validation.
    """

    target: Text | Names
    kind: Literal["classification", "regression"] | None = None
    categories: Names | None = None
    ignore: Names | None = None
    missing: Literal["refuse", "mean"] = "refuse"
    codes: bool = False
    validation: Fraction | None = None


def open_data(request: DataRequest, options: Options) -> DataSet:
    """Open the table at `root`, which is a file, or a folder with train.csv and optionally val.csv.

    Parquet files are supported too. Raises UsageError if a column is missing or has invalid values.
    """
    files = _read_files(Path(request.root))
    existing_split = f"the validation file in {request.root}" if len(files) > 1 else None
    fraction = get_validation_fraction("table", options.validation, existing_split)
    targets = [options.target] if isinstance(options.target, str) else options.target
    categories, ignored = options.categories or (), options.ignore or ()
    _check_columns_exist(files[0], [*targets, *categories, *ignored])
    input_names = [name for name in files[0].column_names if name not in {*targets, *ignored}]
    if not input_names:
        raise UsageError(
            f"dataset table: {request.root} has no input columns in addition to the target {', '.join(targets)}; add "
            f"columns, or remove columns from recipe.data.options.ignore"
        )
    fill_missing = options.missing == "mean"
    for table in files:  # check full files, so that row numbers in errors match the files
        for name in input_names:
            if name not in categories:
                check_input_column(name, table[name], fill_missing)
        _check_targets(table, targets, options.kind)
    train, validation, row_indices = _split_rows(files, fraction)
    columns = [fit_column(name, train[name], name in categories, fill_missing) for name in input_names]
    classes = _find_classes(train, targets, options.kind)
    question = "" if options.kind or classes is None else _make_kind_hint(train, targets[0], classes)
    splits = [
        TableSplit(columns, table, _encode_targets(table, targets, classes, question), options.codes)
        for table in (train, validation)
        if table is not None
    ]
    dataset_info: dict[str, Any] = {
        "shape": splits[0].shape,
        "columns": [column.saved_properties for column in columns],
    }
    scales = [] if classes is not None else [_measure_target_scale(name, train) for name in targets]
    if classes is None:
        dataset_info |= {
            "outputs": len(targets),
            "targets": targets,
            "target_scale": [[mean, std or 1.0] for mean, std in scales],
        }
    else:
        dataset_info["classes"] = list(map(str, classes))
    return DataSet(
        train=splits[0],
        validation=splits[1] if len(splits) > 1 else None,
        facts=dataset_info,
        skipped=None if classes is None else compute_skip_mask,
        name=lambda number: f"row {row_indices[0][number]}",
        validation_name=lambda number: f"row {row_indices[1][number]}",
        question=question,
    )


def _measure_target_scale(name: str, train: pyarrow.Table) -> tuple[float, float]:
    """Return the mean and standard deviation of a target in the training split."""
    values = _to_floats(name, train[name]).astype(np.float64)
    return float(values.mean()), float(values.std())


def _read_files(root: Path) -> list[pyarrow.Table]:
    """Read the table in a file, or the training table and, if it exists, the validation table in a folder."""
    if not root.is_dir():
        return [read_table(root)]
    for suffix in (".csv", ".parquet"):
        train, validation = root / f"train{suffix}", root / f"val{suffix}"
        if train.exists():
            return (
                [*select_same_columns(validation, read_table(train), read_table(validation))]
                if validation.exists()
                else [read_table(train)]
            )
    raise UsageError(
        f"dataset table: {root} contains neither train.csv nor train.parquet; set recipe.data.root to a file, or to a "
        f"folder with one of them"
    )


def _split_rows(
    files: Sequence[pyarrow.Table], fraction: float
) -> tuple[pyarrow.Table, pyarrow.Table | None, list[NDArray[np.int64]]]:
    """Return the training rows, the validation rows or None, and the row indices in the file for both splits."""
    if len(files) > 1:
        return files[0], files[1], [np.arange(len(file)) for file in files]
    table = files[0]
    is_held_out = make_held_out_mask(len(table), fraction)
    if fraction and (not is_held_out.any() or is_held_out.all()):
        raise UsageError(
            f"dataset table: recipe.data.options.validation: {fraction} of {len(table):,} rows leaves the training or "
            f"validation split without rows; use a different fraction, or 0"
        )
    rows = [np.flatnonzero(~is_held_out), np.flatnonzero(is_held_out)]
    return table.filter(~is_held_out), table.filter(is_held_out) if fraction else None, rows


def _check_columns_exist(table: pyarrow.Table, column_names: list[str]) -> None:
    for name in column_names:
        if name not in table.column_names:
            raise UsageError(f"dataset table: no column '{name}'{format_choices(name, table.column_names)}")


def _find_classes(table: pyarrow.Table, targets: list[str], kind: str | None) -> list[Any] | None:
    """Return the sorted classes of the target, or None for regression."""
    import pyarrow.types as types

    column = table[targets[0]]
    is_floating = all(types.is_floating(table[name].type) or types.is_decimal(table[name].type) for name in targets)
    if kind == "regression" or (kind is None and (is_floating or len(targets) > 1)):
        return None
    if len(targets) > 1:
        raise UsageError(
            f"dataset table: recipe.data.options.target: {len(targets)} columns, but classification supports only 1; "
            f"set a single column, or recipe.data.options.kind=regression"
        )
    classes = sorted(value for value in column.unique().to_pylist() if value is not None)
    is_unclear = len(classes) > _MAX_CLASSES or (len(classes) > _MAX_SPARSE_CLASSES and 10 * len(classes) > len(table))
    if kind is None and types.is_integer(column.type) and is_unclear:
        raise UsageError(_format_kind_hint(table, targets[0], classes))
    return classes


def _make_kind_hint(table: pyarrow.Table, target: str, classes: list[Any]) -> str:
    """Return an error message that asks the user to set `kind`, or an empty string if the kind is clear.

    The kind is unclear if the target has more than a few distinct integers, with gaps between them.
    """
    import pyarrow.types as types

    has_many_integers = types.is_integer(table[target].type) and len(classes) > _MAX_SPARSE_CLASSES
    return (
        _format_kind_hint(table, target, classes)
        if has_many_integers and classes[-1] - classes[0] >= len(classes)
        else ""
    )


def _format_kind_hint(table: pyarrow.Table, target: str, classes: list[Any]) -> str:
    return (
        f"dataset table: recipe.data.options.target: '{target}' has {len(classes):,} distinct integers in "
        f"{len(table):,} training rows; set recipe.data.options.kind to regression if they are amounts, or to "
        f"classification if each is a class"
    )


def _check_targets(table: pyarrow.Table, target_names: list[str], kind: str | None) -> None:
    for name in target_names:
        column = table[name]
        problem = f"dataset table: recipe.data.options.target: '{name}'"
        if column.null_count:
            row = column.is_null().to_pylist().index(True)
            raise UsageError(f"{problem} is missing in 0-based row {row:,}; remove such rows")
        if kind != "classification":
            reject_mixed_column(name, column, "or set recipe.data.options.kind=classification")
        if get_column_kind(column) == "other":
            raise UsageError(
                f"{problem} has type {column.type}, but only numbers and text are supported; set a different column"
            )


def _encode_targets(
    table: pyarrow.Table, target_names: list[str], classes: list[Any] | None, kind_hint: str
) -> torch.Tensor:
    if classes is None:
        return torch.from_numpy(np.stack([_to_floats(name, table[name]) for name in target_names], axis=1))
    codes = {value: number for number, value in enumerate(classes)}
    numbers = [codes.get(value, -1) for value in table[target_names[0]].to_pylist()]
    if -1 in numbers:
        unknown_class = table[target_names[0]][numbers.index(-1)].as_py()
        problem = f"validation has the class {unknown_class!r}, which does not occur in training; remove such rows"
        raise UsageError(kind_hint or f"dataset table: recipe.data.options.target: {problem}")
    return torch.tensor(numbers)


def _to_floats(name: str, column: Any) -> NDArray[np.float32]:
    try:
        values: NDArray[np.float32] = column.cast("float64").to_numpy().astype(np.float32)
    except Exception as error:  # pyarrow raises many types of exceptions
        problem = f"'{name}' has type {column.type}, and cannot be converted to numbers"
        advice = "use numbers, or recipe.data.options.kind=classification with a single target"
        raise UsageError(f"dataset table: recipe.data.options.target: {problem}; {advice}") from error
    if not np.isfinite(values).all():
        row = int((~np.isfinite(values)).argmax())
        raise UsageError(
            f"dataset table: recipe.data.options.target: '{name}' is not finite in 0-based row {row:,}; remove such "
            f"rows"
        )
    return values
