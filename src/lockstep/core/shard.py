"""Sharded tensors. Each rank holds some rows of a tensor, or of a rearranged tensor."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor


class Segment(NamedTuple):
    """A range of elements that are consecutive both in the shard and in the full tensor, in row-major order."""

    offset: int  # offset in the full tensor
    local_offset: int  # offset in the shard
    length: int


class Chunked(NamedTuple):
    """The rearrangement of a tensor of shape `shape` in which tensor-parallel chunks are consecutive rows.

    The tensor is viewed with shape `view`, dim `dim` is moved to the front, and all dims except the last are flattened
    into rows. A 1-dim tensor stays 1-dim, and each of its elements is a row.
    """

    shape: tuple[int, ...]
    view: tuple[int, ...]
    dim: int

    @property
    def flat(self) -> bool:
        """Whether the tensor has one dim."""
        return len(self.shape) == 1

    def to_rows(self, full_tensor: Tensor) -> Tensor:
        """Return the tensor with its chunks as rows. Copies the tensor unless it already has this order."""
        rearranged = full_tensor.reshape(self.view).movedim(self.dim, 0)
        return rearranged.reshape(-1) if self.flat else rearranged.reshape(-1, self.view[-1])

    def from_rows(self, tensor: Tensor) -> Tensor:
        """Return the tensor with its original shape. This is the inverse of `to_rows`."""
        first = self.view[self.dim]
        remaining_lengths = [length for dim, length in enumerate(self.view) if dim != self.dim]
        return tensor.reshape(first, *remaining_lengths).movedim(0, self.dim).reshape(self.shape)

    def starts(self, rows: slice) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return the offset of each of these rows in the original tensor."""
        width = 1 if self.flat else self.view[-1]
        view = self.view if self.flat else self.view[:-1]
        offsets = np.arange(np.prod(view, dtype=np.int64), dtype=np.int64).reshape(view)
        return np.moveaxis(offsets, self.dim, 0).reshape(-1)[rows] * width


@dataclass(frozen=True, slots=True)
class Shard:
    """Consecutive rows of a tensor of shape `shape`, starting at row `first`. A shard can be empty.

    Rows run along dim 0 of the tensor, or of the rearranged tensor if `chunked` is set. A 0-dim tensor is one row. If
    several ranks hold the same rows, the `primary` rank among them reports on behalf of all of them.
    """

    tensor: Tensor
    first: int
    shape: torch.Size
    primary: bool = True
    chunked: Chunked | None = None

    def iterate_segments(self) -> Iterator[Segment]:
        """Yield the contiguous segments of the shard in order."""
        elements = self.tensor.numel()
        if not elements:
            return
        if self.chunked is None or self.chunked.dim == 0:  # the rows are contiguous in the full tensor
            width = self.shape[1:].numel() if self.chunked is None else elements // len(self.tensor)
            yield Segment(self.first * width, 0, elements)
            return
        starts = self.chunked.starts(slice(self.first, self.first + len(self.tensor)))
        width = elements // len(self.tensor)
        breaks = [0, *(np.flatnonzero(np.diff(starts) != width) + 1).tolist(), len(starts)]
        for begin, end in pairwise(breaks):
            yield Segment(int(starts[begin]), begin * width, (end - begin) * width)


MaybeSharded: TypeAlias = Tensor | Shard  # a Tensor is unsharded: all ranks hold the full tensor
NamedTensors: TypeAlias = Mapping[str, MaybeSharded]


def make_shard(flat: Tensor, first: int, shape: torch.Size) -> Shard:
    """Return a shard of individual elements: `flat` contains elements of a tensor of shape `shape` from `first` on.

    The tensor must have at least one dim. Each element is treated as a row.
    """
    if len(shape) == 1:
        return Shard(flat, first, shape)
    return Shard(flat.unsqueeze(1), first, shape, chunked=Chunked(tuple(shape), (*shape, 1), 0))


def local_tensor(value: MaybeSharded) -> Tensor:
    """Return the tensor that this rank holds."""
    return value.tensor if isinstance(value, Shard) else value


def select_rows(full_tensor: Tensor, like: MaybeSharded) -> Tensor:
    """Return the rows of `full_tensor` that `like` holds. The result is a view unless `like` has rearranged rows."""
    if not isinstance(like, Shard) or not like.shape:
        return full_tensor
    rows = full_tensor if like.chunked is None else like.chunked.to_rows(full_tensor)
    return rows[like.first : like.first + len(like.tensor)]


def shard_like(tensor: Tensor, template: MaybeSharded) -> MaybeSharded:
    """Return `tensor` as a shard with the same rows as `template`. Both must have the same local shape."""
    return replace(template, tensor=tensor) if isinstance(template, Shard) else tensor


def unsharded_tensors(tensors: NamedTensors) -> dict[str, Tensor]:
    """Return the tensors that aren't sharded."""
    return {name: value for name, value in tensors.items() if not isinstance(value, Shard)}
