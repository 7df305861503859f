"""Reads tables from files with pyarrow."""

from pathlib import Path
from typing import Any

from lockstep.common import plainfile
from lockstep.common.importing import import_extra
from lockstep.errors import UsageError


def read(file: Path) -> Any:
    """Return a .csv or .parquet file as a pyarrow Table. Raises UsageError if it can't be read."""
    pyarrow = import_extra("pyarrow", "tables", "data set table")
    from pyarrow import csv, parquet

    readers = {".csv": csv.read_csv, ".parquet": parquet.read_table}
    if file.suffix not in readers:
        raise UsageError(f"data set table: {file} is neither .csv nor .parquet; name such a file in recipe.data.root")
    try:
        with plainfile.reader(file, links=True) as stream:
            table = readers[file.suffix](stream)
        names = table.column_names
    except OSError as error:
        raise UsageError(f"data set table: {file} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise UsageError(f"data set table: the names of columns in {file} are no UTF-8; convert it") from None
    except pyarrow.ArrowException as error:
        first = str(error).splitlines()[0]
        raise UsageError(f"data set table: {file} is no {file.suffix} table: {first}") from None
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(f"data set table: {file} has several columns {', '.join(map(repr, twice))}; rename them")
    if not len(table):
        raise UsageError(f"data set table: {file} has no rows")
    return table


def same_columns(file: Path, train: Any, validation: Any) -> tuple[Any, Any]:
    """Return both tables, the second with the columns of the first. Raises UsageError if columns are missing."""
    if missing := [name for name in train.column_names if name not in validation.column_names]:
        raise UsageError(f"data set table: {file} lacks the columns {', '.join(missing)}")
    return train, validation.select(train.column_names)
