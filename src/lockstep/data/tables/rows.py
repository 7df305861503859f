"""A dataset split whose samples are the rows of a table."""

from collections.abc import Sequence
from typing import Any, final

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from lockstep.core.batch import Batch
from lockstep.data.tables.columns import CategoricalColumn, NumericColumn


@final
class TableSplit:
    """A split whose batches are (inputs, targets).

    Inputs are float32 of shape [n, features]. The features are the numeric columns, followed by the one-hot encoding of
    each categorical column. If `codes` is True, inputs are a dict with `numbers`, float32 of shape [n, numbers], and
    `categories`, int64 of shape [n, categories].
    """

    in_memory: bool = True

    def __init__(
        self, columns: Sequence[NumericColumn | CategoricalColumn], table: Any, targets: Tensor, codes: bool
    ) -> None:
        encoded = [(column, column.encode(table[column.name])) for column in columns]
        numbers = [values for column, values in encoded if isinstance(column, NumericColumn)]
        categories = [(column, values) for column, values in encoded if isinstance(column, CategoricalColumn)]
        rows = len(targets)
        self._numbers = _stack_columns(numbers, rows, torch.float32)
        self._categories = _stack_columns([values for _, values in categories], rows, torch.int64)
        self._sizes = [len(column.values) for column, _ in categories]
        self._targets = targets
        self._codes = codes

    def __len__(self) -> int:
        return len(self._targets)

    @property
    def shape(self) -> list[int]:
        """The input shape of a sample. If `codes` is True, this is the shape of `numbers`."""
        return [self._numbers.shape[1] + (0 if self._codes else sum(self._sizes))]

    def fetch(self, indices: NDArray[np.int64], random_key: int | None) -> Batch:
        """See Split."""
        positions = torch.from_numpy(np.array(indices))
        numbers, categories = self._numbers[positions], self._categories[positions]
        if self._codes:
            return {"numbers": numbers, "categories": categories}, self._targets[positions]
        # Values that don't occur in the training split have the last index. Dropping the last column of the one-hot
        # encoding encodes them as zeros.
        one_hot = [
            F.one_hot(categories[:, index], size + 1)[:, :size].float() for index, size in enumerate(self._sizes)
        ]
        return torch.cat([numbers, *one_hot], dim=1), self._targets[positions]


def _stack_columns(columns: Sequence[NDArray[Any]], num_rows: int, dtype: torch.dtype) -> Tensor:
    if not columns:
        return torch.empty(num_rows, 0, dtype=dtype)
    return torch.from_numpy(np.stack(columns, axis=1))
