"""Splits of a sequence of tokens. A sample is a window, and its target is the window one token later."""

import math
from collections.abc import Callable
from typing import Any, Final, Protocol, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.data.base import DataSet
from lockstep.errors import UsageError

_SHOWN: Final = 32  # the number of tokens to show as the name of a sample
IGNORED: Final = -100  # a target that doesn't count: F.cross_entropy's ignore_index


class Tokens(Protocol):
    """A sequence of tokens, in memory or in a file."""

    in_memory: bool  # see Split

    def __len__(self) -> int: ...

    def windows(self, starts: NDArray[np.int64], length: int) -> NDArray[np.int64]:
        """Return `length` tokens from each start, as int64 of shape [len(starts), length]."""


@final
class TokenArray:
    """A sequence of tokens in memory."""

    in_memory: bool = True

    def __init__(self, tokens: NDArray[Any]) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        return len(self._tokens)

    def windows(self, starts: NDArray[np.int64], length: int) -> NDArray[np.int64]:
        """See Tokens."""
        windows: NDArray[np.int64] = self._tokens[starts[:, None] + np.arange(length)].astype(np.int64)
        return windows


@final
class TrainingWindows:
    """All windows of `context` tokens that start at a multiple of `stride` and are followed by a token.

    A batch is (inputs, targets), each int64 of shape [n, context].
    """

    def __init__(self, tokens: Tokens, context: int, stride: int) -> None:
        self.in_memory = tokens.in_memory
        self._tokens = tokens
        self._context = context
        self._stride = stride

    def __len__(self) -> int:
        return (len(self._tokens) - self._context - 1) // self._stride + 1

    def fetch(self, indices: NDArray[np.int64], draw: int | None) -> tuple[Tensor, Tensor]:
        """See Split."""
        windows = torch.from_numpy(self._tokens.windows(indices * self._stride, self._context + 1))
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


@final
class ValidationWindows:
    """Adjacent windows, so that each token except the first is a target exactly once.

    The last window may be shorter. It is padded with token 0 and with targets that are IGNORED.
    """

    def __init__(self, tokens: Tokens, context: int) -> None:
        self.in_memory = tokens.in_memory
        self._tokens = tokens
        self._context = context

    def __len__(self) -> int:
        return math.ceil((len(self._tokens) - 1) / self._context)

    def fetch(self, indices: NDArray[np.int64], draw: int | None) -> tuple[Tensor, Tensor]:
        """See Split."""
        inputs = torch.zeros(len(indices), self._context, dtype=torch.int64)
        targets = torch.full((len(indices), self._context), IGNORED)
        starts = indices * self._context
        is_full = starts + self._context < len(self._tokens)
        self._fill(inputs, targets, is_full, starts, self._context)
        self._fill(inputs, targets, ~is_full, starts, (len(self._tokens) - 1) % self._context)
        return inputs, targets

    def _fill(
        self, inputs: Tensor, targets: Tensor, rows: NDArray[np.bool_], starts: NDArray[np.int64], length: int
    ) -> None:
        if rows.any():
            windows = torch.from_numpy(self._tokens.windows(starts[rows], length + 1))
            mask = torch.from_numpy(rows)
            inputs[mask, :length] = windows[:, :-1]
            targets[mask, :length] = windows[:, 1:]


def build_windows(
    label: str,
    train: Tokens,
    validation: Tokens | None,
    context: int,
    stride: int | None,
    facts: dict[str, Any],
    decode: Callable[[NDArray[Any]], str] | None = None,
) -> DataSet:
    """Return both parts as windows. Raises UsageError if a part is too short.

    If `stride` is None, each token is in one training window. `facts` must contain the size of the `vocabulary`. Adds
    the `context` to them. `decode` converts tokens to the text that names a sample. Without it, a sample is named by
    the index of its first token.
    """
    step = stride or context

    def sample_name(number: int) -> str:
        starts = np.array([number * step])
        return f"token {starts[0]}" if decode is None else repr(decode(train.windows(starts, min(context, _SHOWN))[0]))

    for name, part, minimum, advice in (
        ("training", train, context + 1, "use more text, or a smaller recipe.data.options.context"),
        ("validation", validation, 2, "use more text"),
    ):
        if part is not None and len(part) < minimum:
            raise UsageError(
                f"dataset {label}: the {name} part has {len(part):,} tokens, but a window needs {minimum:,}; {advice}"
            )
    return DataSet(
        train=TrainingWindows(train, context, step),
        validation=None if validation is None else ValidationWindows(validation, context),
        facts={**facts, "context": context},
        name=sample_name,
    )
