"""Splits a token sequence into windows. A sample is a window, and its targets are the window shifted by one token."""

import math
from collections.abc import Callable
from typing import Any, Final, Protocol, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.data.base import DataSet
from lockstep.errors import UsageError

_MAX_SHOWN: Final = 32  # maximum number of tokens in the name of a sample
IGNORED: Final = -100  # marks targets that don't count; the default ignore_index of F.cross_entropy


class TokenSequence(Protocol):
    """The interface of a sequence of tokens in memory or in a file."""

    in_memory: bool  # see Split

    def __len__(self) -> int: ...

    def get_windows(self, starts: NDArray[np.int64], length: int) -> NDArray[np.int64]:
        """Return the windows of `length` tokens that begin at `starts`, as int64 of shape [len(starts), length]."""


@final
class TokenArray:
    """A sequence of tokens in memory."""

    in_memory: bool = True

    def __init__(self, tokens: NDArray[Any]) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        return len(self._tokens)

    def get_windows(self, starts: NDArray[np.int64], length: int) -> NDArray[np.int64]:
        """See TokenSequence."""
        windows: NDArray[np.int64] = self._tokens[starts[:, None] + np.arange(length)].astype(np.int64)
        return windows


@final
class TrainingWindows:
    """A split of windows of `context` tokens that start at multiples of `stride`.

    A batch is (inputs, targets), both int64 of shape [n, context]. The last target is the token after the window.
    """

    def __init__(self, tokens: TokenSequence, context: int, stride: int) -> None:
        self.in_memory = tokens.in_memory
        self._tokens = tokens
        self._context = context
        self._stride = stride

    def __len__(self) -> int:
        return (len(self._tokens) - self._context - 1) // self._stride + 1

    def fetch(self, indices: NDArray[np.int64], random_key: int | None) -> tuple[Tensor, Tensor]:
        """See Split."""
        windows = torch.from_numpy(self._tokens.get_windows(indices * self._stride, self._context + 1))
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


@final
class ValidationWindows:
    """A split of adjacent windows, in which each token except for the first is a target exactly once.

    If the last window is shorter, its inputs are padded with token 0, and its targets with IGNORED.
    """

    def __init__(self, tokens: TokenSequence, context: int) -> None:
        self.in_memory = tokens.in_memory
        self._tokens = tokens
        self._context = context

    def __len__(self) -> int:
        return math.ceil((len(self._tokens) - 1) / self._context)

    def fetch(self, indices: NDArray[np.int64], random_key: int | None) -> tuple[Tensor, Tensor]:
        """See Split."""
        inputs = torch.zeros(len(indices), self._context, dtype=torch.int64)
        targets = torch.full((len(indices), self._context), IGNORED)
        starts = indices * self._context
        is_full = starts + self._context < len(self._tokens)
        self._fill_windows(inputs, targets, is_full, starts, self._context)
        self._fill_windows(inputs, targets, ~is_full, starts, (len(self._tokens) - 1) % self._context)
        return inputs, targets

    def _fill_windows(
        self,
        inputs: Tensor,
        targets: Tensor,
        row_mask: NDArray[np.bool_],
        window_starts: NDArray[np.int64],
        window_length: int,
    ) -> None:
        if row_mask.any():
            windows = torch.from_numpy(self._tokens.get_windows(window_starts[row_mask], window_length + 1))
            mask = torch.from_numpy(row_mask)
            inputs[mask, :window_length] = windows[:, :-1]
            targets[mask, :window_length] = windows[:, 1:]


def make_window_dataset(
    label: str,
    train: TokenSequence,
    validation: TokenSequence | None,
    context: int,
    stride: int | None,
    dataset_info: dict[str, Any],
    decode: Callable[[NDArray[Any]], str] | None = None,
) -> DataSet:
    """Return a dataset of windows. Raises UsageError if a split has too few tokens.

    - `stride`: The number of tokens between the starts of consecutive training windows. Defaults to `context`.
    - `dataset_info`: The dataset properties, which must contain the `vocabulary` size. The property `context` is added.
    - `decode`: Converts tokens to text, to name a sample after its text. If None, a sample is named after the index of
      its first token.
    """
    interval = stride or context

    def format_sample_name(number: int) -> str:
        starts = np.array([number * interval])
        return (
            f"token {starts[0]}"
            if decode is None
            else repr(decode(train.get_windows(starts, min(context, _MAX_SHOWN))[0]))
        )

    for name, tokens, minimum, advice in (
        ("training", train, context + 1, "use more text, or a smaller recipe.data.options.context"),
        ("validation", validation, 2, "use more text"),
    ):
        if tokens is not None and len(tokens) < minimum:
            raise UsageError(
                f"dataset {label}: the {name} split has {len(tokens):,} tokens, but a window needs {minimum:,}; "
                f"{advice}"
            )
    return DataSet(
        train=TrainingWindows(train, context, interval),
        validation=None if validation is None else ValidationWindows(validation, context),
        facts={**dataset_info, "context": context},
        name=format_sample_name,
    )
