"""Opens datasets that were saved with `save_to_disk` of Hugging Face's `datasets`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from lockstep.common import plainfile
from lockstep.common.importing import import_extra
from lockstep.common.names import format_choices
from lockstep.data.base import DataSet
from lockstep.data.imported import import_collate, wrap_map_style
from lockstep.data.options import Fraction, Names, Text
from lockstep.data.request import DataRequest
from lockstep.data.validation_split import get_validation_fraction, make_held_out_mask
from lockstep.errors import UsageError

_TRAIN: Final = "train"  # default names of the splits
_HELD_OUT: Final = "validation"


@dataclass(frozen=True)
class Options:
    """The columns of a sample, and the splits for training and validation.

    - `inputs`: The input columns. Defaults to all columns except for the target.
    - `target`: The target column. If set, a sample is the pair (inputs, target). Otherwise, it consists of the inputs.
    - `train`, `held_out`: The splits of a DatasetDict for training and validation. Default to `train`, and to
      `validation` if there is such a split.
    - `validation`: The fraction of rows for validation if there is no split for it. Defaults to 0.1. 0 means no
      validation.

    The inputs of a sample are a dict from column name to value. If `inputs` is a single name, or if there is a target
    and only one input column, the inputs are the value of that column.
    """

    inputs: Text | Names | None = None
    target: Text | None = None
    train: Text | None = None
    held_out: Text | None = None
    validation: Fraction | None = None


def open_data(request: DataRequest, options: Options) -> DataSet:
    """Open the dataset at `root`. Rows are read on demand."""
    train, held_out = _load_splits(request.root, options)
    existing_split = None if held_out is None else f"the split '{options.held_out or _HELD_OUT}' of {request.root}"
    fraction = get_validation_fraction("datasets", options.validation, existing_split)
    numbers = np.arange(len(train))
    if held_out is None:
        is_held_out = make_held_out_mask(len(train), fraction)
        numbers, held_out_numbers = numbers[~is_held_out], numbers[is_held_out]
        validation = _select_columns(train, held_out_numbers, options) if len(held_out_numbers) else None
    else:
        validation = _select_columns(held_out, np.arange(len(held_out)), options)
    if not len(numbers):
        raise UsageError(
            f"dataset datasets: {request.root} has {len(train):,} rows, and none are left for training; add rows, or "
            f"set a smaller recipe.data.options.validation"
        )
    names = getattr(train.features.get(options.target), "names", None)
    label = f"dataset {request.name}"
    return wrap_map_style(
        label, _select_columns(train, numbers, options), validation, names, import_collate(request.collate)
    )


@final
class ColumnDataset:
    """A map-style dataset of selected rows and columns of a table."""

    def __init__(
        self, rows: Any, row_indices: NDArray[np.int64], inputs: str | Sequence[str], target: str | None
    ) -> None:
        self._rows = rows
        self._numbers = row_indices
        self._inputs = inputs
        self._target = target

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Any:
        row = self._rows[int(self._numbers[index])]
        inputs = row[self._inputs] if isinstance(self._inputs, str) else {name: row[name] for name in self._inputs}
        return inputs if self._target is None else (inputs, row[self._target])


def _load_splits(root: str, options: Options) -> tuple[Any, Any]:
    datasets = import_extra("datasets", "datasets", "dataset datasets")
    if not Path(root).is_dir():
        raise UsageError(
            f"dataset datasets: {root}: no such folder; set recipe.data.root to a folder that save_to_disk wrote"
        )
    try:
        plainfile.check_folder(Path(root))
        dataset = datasets.load_from_disk(root)
    except Exception as error:  # datasets may raise any exception while reading
        message = str(error).splitlines()[0] if str(error) else type(error).__name__
        advice = "set recipe.data.root to a folder that save_to_disk wrote"
        raise UsageError(f"dataset datasets: cannot open {root}: {message}; {advice}") from error
    if isinstance(dataset, datasets.Dataset):
        for option, name in (("train", options.train), ("held_out", options.held_out)):
            if name is not None:
                raise UsageError(
                    f"dataset datasets: recipe.data.options.{option}: {root} is a Dataset without splits; remove it"
                )
        return dataset, None
    train = _TRAIN if options.train is None else options.train
    for name in (train, options.held_out):
        if name is not None and name not in dataset:
            raise UsageError(f"dataset datasets: {root} has no split '{name}'{format_choices(name, dataset)}")
    return dataset[train], dataset.get(options.held_out or _HELD_OUT)


def _select_columns(rows: Any, row_indices: NDArray[np.int64], options: Options) -> ColumnDataset:
    names = rows.column_names
    inputs = options.inputs if options.inputs is not None else [name for name in names if name != options.target]
    input_names = [inputs] if isinstance(inputs, str) else inputs
    for name in [*input_names, *([options.target] if options.target is not None else [])]:
        if name not in names:
            raise UsageError(f"dataset datasets: no column '{name}'{format_choices(name, names)}")
    is_single = options.target is not None and len(input_names) == 1
    return ColumnDataset(rows, row_indices, input_names[0] if is_single else inputs, options.target)
