"""A tensor that is cut over several ranks: each holds some of its rows, of the tensor itself or of it rearranged."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor


class Segment(NamedTuple):
    """Elements that follow each other in a shard and in the whole, both in row-major order."""

    at: int  # where they begin in the whole
    own: int  # and in the shard
    length: int


class Chunked(NamedTuple):
    """How a tensor is rearranged so that its chunks (parallel/tensor/) are rows that follow each other.

    Seen as a tensor of shape `view`, its dim `dim` comes first, and all dims but the last are rows. A tensor that had
    one dim stays so, and each element is a row. `shape` is its own.
    """

    shape: tuple[int, ...]
    view: tuple[int, ...]
    dim: int

    @property
    def flat(self) -> bool:
        """Whether the tensor has one dim."""
        return len(self.shape) == 1

    def to_rows(self, whole: Tensor) -> Tensor:
        """Return the tensor with its chunks as rows: a copy, unless it is in this order already."""
        moved = whole.reshape(self.view).movedim(self.dim, 0)
        return moved.reshape(-1) if self.flat else moved.reshape(-1, self.view[-1])

    def from_rows(self, tensor: Tensor) -> Tensor:
        """Return what `to_rows` was given."""
        first = self.view[self.dim]
        others = [length for dim, length in enumerate(self.view) if dim != self.dim]
        return tensor.reshape(first, *others).movedim(0, self.dim).reshape(self.shape)

    def starts(self, rows: slice) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return where each of these rows begins in the tensor."""
        width = 1 if self.flat else self.view[-1]
        view = self.view if self.flat else self.view[:-1]
        numbers = np.arange(np.prod(view, dtype=np.int64), dtype=np.int64).reshape(view)
        return np.moveaxis(numbers, self.dim, 0).reshape(-1)[rows] * width


@dataclass(frozen=True, slots=True)
class Shard:
    """Rows of a tensor of `shape`, from row `first` on; possibly none. A 0-dim tensor is one row.

    Rows are the elements of dim 0, of the tensor itself or, where it is `chunked`, of it rearranged. Where several
    ranks hold the same rows, one of them is `primary`: it reports what all would.
    """

    tensor: Tensor
    first: int
    shape: torch.Size
    primary: bool = True
    chunked: Chunked | None = None

    def runs(self) -> Iterator[Segment]:
        """Yield the runs of the rows, in their order."""
        elements = self.tensor.numel()
        if not elements:
            return
        if self.chunked is None or self.chunked.dim == 0:  # rows in the order of the whole
            width = self.shape[1:].numel() if self.chunked is None else elements // len(self.tensor)
            yield Segment(self.first * width, 0, elements)
            return
        starts = self.chunked.starts(slice(self.first, self.first + len(self.tensor)))
        width = elements // len(self.tensor)
        breaks = [0, *(np.flatnonzero(np.diff(starts) != width) + 1).tolist(), len(starts)]
        for begin, end in pairwise(breaks):
            yield Segment(int(starts[begin]), begin * width, (end - begin) * width)


MaybeSharded: TypeAlias = Tensor | Shard  # a Tensor is whole, on every rank
NamedTensors: TypeAlias = Mapping[str, MaybeSharded]


def piece(flat: Tensor, first: int, shape: torch.Size) -> Shard:
    """Return some elements of a tensor of `shape`, which has dims, as a shard: `flat` begins at its element `first`."""
    if len(shape) == 1:
        return Shard(flat, first, shape)
    return Shard(flat.unsqueeze(1), first, shape, chunked=Chunked(tuple(shape), (*shape, 1), 0))


def local_tensor(held: MaybeSharded) -> Tensor:
    """Return what this rank holds."""
    return held.tensor if isinstance(held, Shard) else held


def slice_of(whole: Tensor, like: MaybeSharded) -> Tensor:
    """Return those rows of `whole` that `like` holds: a view, unless they are rearranged."""
    if not isinstance(like, Shard) or not like.shape:
        return whole
    rows = whole if like.chunked is None else like.chunked.to_rows(whole)
    return rows[like.first : like.first + len(like.tensor)]


def shard_like(tensor: Tensor, held: MaybeSharded) -> MaybeSharded:
    """Return `tensor`, which has the shape of what is held, as the same rows of a whole."""
    return replace(held, tensor=tensor) if isinstance(held, Shard) else tensor


def whole_tensors(tensors: NamedTensors) -> dict[str, Tensor]:
    """Return those of the tensors that are not cut."""
    return {name: held for name, held in tensors.items() if not isinstance(held, Shard)}
