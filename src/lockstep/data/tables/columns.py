"""Encodes the columns of a table as model inputs, using statistics of the training split."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, final

import numpy as np
from numpy.typing import NDArray

from lockstep.errors import UsageError

# Matches formatted numbers from spreadsheets, with digit groups, a decimal comma, a currency sign or a percent sign.
_FORMATTED_NUMBER: Final = re.compile(r"[-+]?[$€£¥]?\s?(\d{1,3}([,.'\s]\d{3})+|\d+)([.,]\d+)?\s?[%$€£¥]?")
# The maximum number of distinct values in a categorical column. The values are dataset properties, which are compared
# between ranks and saved in checkpoints.
_MAX_VALUES: Final = 10_000


@final
@dataclass(frozen=True)
class NumericColumn:
    """A numeric column. Values are standardized with the mean and standard deviation of the training split."""

    name: str
    mean: float
    std: float
    fill_missing: bool  # whether missing values are replaced with the mean

    @property
    def saved_properties(self) -> dict[str, Any]:
        """The properties of the column that are saved in a checkpoint."""
        return {"name": self.name, "mean": self.mean, "std": self.std}

    def encode(self, column: Any) -> NDArray[Any]:
        """Return the encoded column as float32 of shape [rows]."""
        values = _to_floats(self.name, column)
        if self.fill_missing:
            values = np.where(np.isnan(values), self.mean, values)
        return np.asarray((values - self.mean) / self.std, np.float32)


@final
@dataclass(frozen=True)
class CategoricalColumn:
    """A categorical column. Values are encoded as their index in `values`, the values of the training split.

    Values that don't occur in the training split are encoded as `len(values)`.
    """

    name: str
    values: tuple[str, ...]

    @property
    def saved_properties(self) -> dict[str, Any]:
        """The properties of the column that are saved in a checkpoint."""
        return {"name": self.name, "values": list(self.values)}

    def encode(self, column: Any) -> NDArray[Any]:
        """Return the encoded column as int64 of shape [rows]."""
        codes = {value: number for number, value in enumerate(self.values)}
        uniques = column.unique().to_pylist()  # look up each distinct value only once
        numbers = {value: codes.get(_to_text(value), len(codes)) for value in uniques}
        return np.array([numbers[value] for value in column.to_pylist()], np.int64)


def get_column_kind(column: Any) -> Literal["number", "name", "other"]:
    """Return the kind of a column: `number`, `name` (text or booleans), or `other`."""
    import pyarrow.types as types

    data_type = column.type.value_type if types.is_dictionary(column.type) else column.type
    if types.is_integer(data_type) or types.is_floating(data_type) or types.is_decimal(data_type):
        return "number"
    is_name = types.is_string(data_type) or types.is_large_string(data_type) or types.is_boolean(data_type)
    return "name" if is_name else "other"


def check_input_column(name: str, column: Any, fill_missing: bool) -> None:
    """Raise UsageError if an input column isn't supported.

    Pass the column of the full file, so that the row numbers in error messages match the file.
    """
    import pyarrow.types as types

    reject_mixed_column(name, column, "or add the column to recipe.data.options.categories")
    if get_column_kind(column) == "number" or types.is_null(column.type):  # all values are missing
        check_numeric_column(name, column, fill_missing)


def check_numeric_column(name: str, column: Any, fill_missing: bool) -> None:
    """Raise UsageError if a numeric column has infinite values or, unless `fill_missing` is True, missing values."""
    values = _to_floats(name, column)
    invalid = np.isinf(values) if fill_missing else ~np.isfinite(values)
    if invalid.any():
        fill = "" if fill_missing else ", or set recipe.data.options.missing=mean for missing values"
        raise UsageError(
            f"dataset table: column '{name}' has {int(invalid.sum()):,} "
            f"{'' if fill_missing else 'missing or '}infinite values, the first in 0-based row "
            f"{int(invalid.argmax()):,}; remove such rows{fill}"
        )


def reject_mixed_column(name: str, column: Any, advice: str) -> None:
    """Raise UsageError if a text column seems to be numeric, but has formatted numbers or a minority of other texts."""
    if get_column_kind(column) != "name":  # pyarrow can't find the unique values of lists
        return
    values = [value for value in column.unique().to_pylist() if isinstance(value, str)]
    texts = {value for value in values if not _is_number(value)}
    formatted_numbers = {value for value in texts if _FORMATTED_NUMBER.fullmatch(value)}
    if texts and 2 * len(texts - formatted_numbers) < len(values):
        row, text = next((row, value) for row, value in enumerate(column.to_pylist()) if value in texts)
        fix = "write only digits and a decimal point" if text in formatted_numbers else "remove such rows"
        raise UsageError(
            f"dataset table: column '{name}' is mostly numeric, but has {text!r} in 0-based row {row:,}; {fix}, "
            f"{advice}"
        )


def fit_column(name: str, column: Any, is_category: bool, fill_missing: bool) -> NumericColumn | CategoricalColumn:
    """Create the encoding of a column from its values in the training split.

    Text and boolean columns are always categorical. All other columns are categorical only if `is_category` is True.
    """
    kind = get_column_kind(column)
    if kind == "number" and not is_category:
        return _fit_numeric_column(name, column, fill_missing)
    if kind == "other" and not is_category:
        raise UsageError(
            f"dataset table: column '{name}' has type {column.type}, but only numbers and text are supported; add it "
            f"to recipe.data.options.ignore or recipe.data.options.categories"
        )
    values = sorted({_to_text(value) for value in column.unique().to_pylist()})
    if len(values) > _MAX_VALUES:
        raise UsageError(
            f"dataset table: column '{name}' has {len(values):,} distinct values, but at most {_MAX_VALUES:,} are "
            f"supported; add it to recipe.data.options.ignore"
        )
    return CategoricalColumn(name, tuple(values))


def restore_column(saved_properties: Mapping[str, Any], fill_missing: bool) -> NumericColumn | CategoricalColumn:
    """Restore the encoding of a column from a checkpoint. Raises UsageError if its saved properties are invalid."""
    match saved_properties:
        case {"name": str(name), "mean": float(mean), "std": float(std)}:
            return NumericColumn(name, mean, std, fill_missing)
        case {"name": str(name), "values": list(values)} if all(isinstance(value, str) for value in values):
            return CategoricalColumn(name, tuple(values))
    raise UsageError(
        f"dataset table: the checkpoint has an invalid column: expected name, mean and std, or name and values, got "
        f"{', '.join(saved_properties) or 'nothing'}; restore the checkpoint"
    )


def _fit_numeric_column(name: str, column: Any, fill_missing: bool) -> NumericColumn:
    values = _to_floats(name, column)
    finite = values[np.isfinite(values)]
    # Compute the statistics in float64 over all rows in file order, so that they are bit-identical on all ranks.
    mean, std = (float(finite.mean()), float(finite.std())) if len(finite) else (0.0, 0.0)
    return NumericColumn(name, mean, std or 1.0, fill_missing)


def _to_floats(name: str, column: Any) -> NDArray[np.float64]:
    try:
        values: NDArray[np.float64] = column.cast("float64").to_numpy()  # nulls become NaN
    except Exception as error:  # pyarrow raises many types of exceptions
        texts = ((row, value) for row, value in enumerate(column.to_pylist()) if isinstance(value, str))
        example = next(
            (f", such as {text!r} in 0-based row {row:,}" for row, text in texts if not _is_number(text)), ""
        )
        problem = f"'{name}' is numeric in training, but has type {column.type} here{example}; use the same type"
        raise UsageError(f"dataset table: column {problem}") from error
    return values


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _to_text(value: Any) -> str:
    return "" if value is None else str(value)
