"""A tensor that lies on several ranks: each holds some of its rows, the elements of dim 0."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Shard:
    """Some rows of a tensor of `shape`, from row `first` on; possibly none. A 0-dim tensor is one row.

    Where several ranks hold the same rows, one of them is `primary`: it speaks where all would say the same.
    """

    tensor: Tensor
    first: int
    shape: torch.Size
    primary: bool = True


Held: TypeAlias = Tensor | Shard  # a Tensor is whole, on every rank


def local(held: Held) -> Tensor:
    """Return what this rank holds."""
    return held.tensor if isinstance(held, Shard) else held


def rows_of(whole: Tensor, like: Held) -> Tensor:
    """Return those rows of `whole` that `like` holds: a view."""
    if not isinstance(like, Shard) or not like.shape:
        return whole
    return whole[like.first : like.first + len(like.tensor)]


def alike(tensor: Tensor, held: Held) -> Held:
    """Return `tensor`, which has the shape of what is held, as the same part of a whole."""
    return Shard(tensor, held.first, held.shape, held.primary) if isinstance(held, Shard) else tensor


def whole(tensors: Mapping[str, Held]) -> dict[str, Tensor]:
    """Return those of the tensors that are not cut."""
    return {name: held for name, held in tensors.items() if not isinstance(held, Shard)}
