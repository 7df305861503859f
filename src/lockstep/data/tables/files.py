"""Reads CSV and Parquet files with pyarrow."""

from pathlib import Path
from typing import Any

from lockstep.common import plainfile
from lockstep.common.importing import import_extra
from lockstep.errors import UsageError


def read_table(file: Path) -> Any:
    """Read a .csv or .parquet file as a pyarrow Table. Raises UsageError if it can't be read."""
    pyarrow = import_extra("pyarrow", "tables", "dataset table")
    from pyarrow import csv, parquet

    readers = {".csv": csv.read_csv, ".parquet": parquet.read_table}
    if file.suffix not in readers:
        raise UsageError(f"dataset table: {file} is not a .csv or .parquet file; set recipe.data.root to such a file")
    try:
        with plainfile.open_reader(file, links=True) as stream:
            table = readers[file.suffix](stream)
        names = table.column_names
    except OSError as error:
        problem = f"cannot read {file}: {error.strerror or error}"
        raise UsageError(f"dataset table: {problem}; set recipe.data.root to a readable file") from None
    except UnicodeDecodeError:
        raise UsageError(f"dataset table: the column names of {file} are not valid UTF-8; convert the file") from None
    except pyarrow.ArrowException as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"dataset table: {file} is not a valid {file.suffix} table: {reason}; correct it") from None
    if duplicates := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(f"dataset table: {file} has duplicate columns {', '.join(map(repr, duplicates))}; rename them")
    if not len(table):
        raise UsageError(f"dataset table: {file} has no rows; add at least one")
    return table


def select_same_columns(file: Path, train: Any, validation: Any) -> tuple[Any, Any]:
    """Return both tables with the columns of `train`. Raises UsageError if a column is missing in `validation`."""
    if missing := [name for name in train.column_names if name not in validation.column_names]:
        raise UsageError(
            f"dataset table: {file} lacks columns of the training table: {', '.join(missing)}; add these columns"
        )
    return train, validation.select(train.column_names)
