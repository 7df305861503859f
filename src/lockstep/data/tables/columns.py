"""Encodes the columns of a table for a model. Statistics of the training part also apply to validation."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, final

import numpy as np
from numpy.typing import NDArray

from lockstep.errors import UsageError

# A number as people and spreadsheets write it: with groups of three digits, a decimal comma, a currency sign or %.
_WRITTEN: Final = re.compile(r"[-+]?[$€£¥]?\s?(\d{1,3}([,.'\s]\d{3})+|\d+)([.,]\d+)?\s?[%$€£¥]?")
_MOST_VALUES: Final = 10_000  # per category; they are facts, which ranks compare and checkpoints save


@final
@dataclass(frozen=True)
class Number:
    """A numeric column, encoded as the distance from the training mean in standard deviations."""

    name: str
    mean: float
    std: float
    means: bool  # missing values are replaced by the mean

    @property
    def facts(self) -> dict[str, Any]:
        """Return the facts to save in a checkpoint."""
        return {"name": self.name, "mean": self.mean, "std": self.std}

    def encode(self, column: Any) -> NDArray[Any]:
        """Return the encoded column as float32 of shape [rows]."""
        values = _floats(self.name, column)
        if self.means:
            values = np.where(np.isnan(values), self.mean, values)
        return np.asarray((values - self.mean) / self.std, np.float32)


@final
@dataclass(frozen=True)
class Category:
    """A categorical column, encoded as the index among the values in training.

    One more index stands for all other values.
    """

    name: str
    values: tuple[str, ...]

    @property
    def facts(self) -> dict[str, Any]:
        """Return the facts to save in a checkpoint."""
        return {"name": self.name, "values": list(self.values)}

    def encode(self, column: Any) -> NDArray[Any]:
        """Return the encoded column as int64 of shape [rows]."""
        codes = {value: number for number, value in enumerate(self.values)}
        uniques = column.unique().to_pylist()  # usually fewer than rows
        numbers = {value: codes.get(_text(value), len(codes)) for value in uniques}
        return np.array([numbers[value] for value in column.to_pylist()], np.int64)


def kind_of(column: Any) -> Literal["number", "name", "other"]:
    """Return the kind of a column: number, name (text or booleans), or other."""
    import pyarrow.types as types

    data_type = column.type.value_type if types.is_dictionary(column.type) else column.type
    if types.is_integer(data_type) or types.is_floating(data_type) or types.is_decimal(data_type):
        return "number"
    is_name = types.is_string(data_type) or types.is_large_string(data_type) or types.is_boolean(data_type)
    return "name" if is_name else "other"


def check_input(name: str, column: Any, means: bool) -> None:
    """Raise UsageError if an input column can't be used.

    Pass the column of the whole file, so that row numbers match the file.
    """
    import pyarrow.types as types

    refuse_mixed(name, column, "or add the column to recipe.data.options.categories")
    if kind_of(column) == "number" or types.is_null(column.type):  # the null type, if all values are missing
        check_numbers(name, column, means)


def check_numbers(name: str, column: Any, means: bool) -> None:
    """Raise UsageError if a column has infinite values, or missing values without `means`. See `check_input`."""
    values = _floats(name, column)
    invalid = np.isinf(values) if means else ~np.isfinite(values)
    if invalid.any():
        fill = "" if means else ", or set recipe.data.options.missing=mean for missing values"
        raise UsageError(
            f"dataset table: column '{name}' has {int(invalid.sum()):,} {'' if means else 'missing or '}infinite "
            f"values, the first in row {int(invalid.argmax()):,}; remove such rows{fill}"
        )


def refuse_mixed(name: str, column: Any, advice: str) -> None:
    """Raise UsageError if a column of numbers was read as text, because a few values are not numbers or have commas."""
    if kind_of(column) != "name":  # pyarrow can't find the unique values of lists
        return
    values = [value for value in column.unique().to_pylist() if isinstance(value, str)]
    texts = {value for value in values if not _is_number(value)}
    formatted_numbers = {value for value in texts if _WRITTEN.fullmatch(value)}
    if texts and 2 * len(texts - formatted_numbers) < len(values):
        row, text = next((row, value) for row, value in enumerate(column.to_pylist()) if value in texts)
        fix = "write only digits and a decimal point" if text in formatted_numbers else "remove such rows"
        raise UsageError(f"dataset table: column '{name}' has numbers, but {text!r} in row {row:,}; {fix}, {advice}")


def column_of(name: str, column: Any, is_category: bool, means: bool) -> Number | Category:
    """Return the encoding of a training column. Text, booleans and the columns in options.categories are categories."""
    kind = kind_of(column)
    if kind == "number" and not is_category:
        return _number(name, column, means)
    if kind == "other" and not is_category:
        raise UsageError(
            f"dataset table: column '{name}' has type {column.type}, but only numbers and text are supported; add it "
            f"to recipe.data.options.ignore or recipe.data.options.categories"
        )
    values = sorted({_text(value) for value in column.unique().to_pylist()})
    if len(values) > _MOST_VALUES:
        raise UsageError(
            f"dataset table: column '{name}' has {len(values):,} distinct values, but at most {_MOST_VALUES:,} are "
            f"supported; add it to recipe.data.options.ignore"
        )
    return Category(name, tuple(values))


def restore_column(facts: Mapping[str, Any], means: bool) -> Number | Category:
    """Return the column with these facts from a checkpoint. Raises UsageError if the facts don't describe a column."""
    match facts:
        case {"name": str(name), "mean": float(mean), "std": float(std)}:
            return Number(name, mean, std, means)
        case {"name": str(name), "values": list(values)} if all(isinstance(value, str) for value in values):
            return Category(name, tuple(values))
    raise UsageError(
        f"dataset table: expected name, mean and std, or name and values, for a column of the checkpoint, got "
        f"{', '.join(facts) or 'nothing'}; restore the checkpoint"
    )


def _number(name: str, column: Any, means: bool) -> Number:
    values = _floats(name, column)
    finite = values[np.isfinite(values)]
    # Over all rows in order, and in float64: the same bits on every rank.
    mean, std = (float(finite.mean()), float(finite.std())) if len(finite) else (0.0, 0.0)
    return Number(name, mean, std or 1.0, means)


def _floats(name: str, column: Any) -> NDArray[np.float64]:
    try:
        values: NDArray[np.float64] = column.cast("float64").to_numpy()  # nulls become NaN
    except Exception as error:  # pyarrow raises many types of errors
        texts = ((row, value) for row, value in enumerate(column.to_pylist()) if isinstance(value, str))
        example = next((f", such as {text!r} in row {row:,}" for row, text in texts if not _is_number(text)), "")
        problem = f"'{name}' has numbers in training, but type {column.type} here{example}; use the same type"
        raise UsageError(f"dataset table: column {problem}") from error
    return values


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _text(value: Any) -> str:
    return "" if value is None else str(value)
