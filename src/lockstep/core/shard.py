"""A tensor that is cut over several ranks: each holds a slice of it along one dim."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor


class Run(NamedTuple):
    """Elements that follow each other in a slice and in the whole, both in row-major order."""

    at: int  # where they begin in the whole
    own: int  # and in the slice
    length: int


@dataclass(frozen=True, slots=True)
class Shard:
    """A slice of a tensor of `shape` along `dim`, from index `first` on; possibly empty. A 0-dim tensor is one slice.

    Where several ranks hold the same slice, one of them is `primary`: it reports what all would.
    """

    tensor: Tensor
    first: int
    shape: torch.Size
    primary: bool = True
    dim: int = 0

    def runs(self) -> Iterator[Run]:
        """Yield the runs of the slice: one along dim 0, else one for each index of the dims before."""
        if not self.tensor.numel():
            return
        outer, inner = self.shape[: self.dim].numel(), self.shape[self.dim + 1 :].numel()
        own = self.tensor.numel() // outer
        for number in range(outer):
            yield Run(number * self.shape[self.dim :].numel() + self.first * inner, number * own, own)


MaybeSharded: TypeAlias = Tensor | Shard  # a Tensor is whole, on every rank


def local_tensor(held: MaybeSharded) -> Tensor:
    """Return what this rank holds."""
    return held.tensor if isinstance(held, Shard) else held


def slice_of(whole: Tensor, like: MaybeSharded) -> Tensor:
    """Return that slice of `whole` which `like` holds: a view."""
    if not isinstance(like, Shard) or not like.shape:
        return whole
    return whole.narrow(like.dim, like.first, like.tensor.shape[like.dim])


def sharded_as(tensor: Tensor, held: MaybeSharded) -> MaybeSharded:
    """Return `tensor`, which has the shape of what is held, as the same slice of a whole."""
    return replace(held, tensor=tensor) if isinstance(held, Shard) else tensor


def unsharded(tensors: Mapping[str, MaybeSharded]) -> dict[str, Tensor]:
    """Return those of the tensors that are not cut."""
    return {name: held for name, held in tensors.items() if not isinstance(held, Shard)}
