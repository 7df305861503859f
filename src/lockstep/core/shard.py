"""Sharded tensors: each rank holds some rows of a tensor, or of a rearranged tensor."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor


class Segment(NamedTuple):
    """A range of elements that is contiguous in both the shard and the full tensor, in row-major order."""

    offset: int  # offset in the full tensor
    local_offset: int  # offset in the shard
    length: int


class ChunkLayout(NamedTuple):
    """A rearrangement of a tensor of shape `shape` in which each tensor-parallel chunk is a range of rows.

    The tensor is viewed with shape `view`, dim `dim` is moved to the front, and all dims except the last are flattened
    into rows. A 1-dim tensor stays 1-dim, and each of its elements is a row.
    """

    shape: tuple[int, ...]
    view: tuple[int, ...]
    dim: int

    @property
    def is_flat(self) -> bool:
        """Whether the tensor has one dim."""
        return len(self.shape) == 1

    def to_rows(self, full_tensor: Tensor) -> Tensor:
        """Rearrange a full tensor. Returns a copy unless the order of its elements stays the same."""
        rearranged = full_tensor.reshape(self.view).movedim(self.dim, 0)
        return rearranged.reshape(-1) if self.is_flat else rearranged.reshape(-1, self.view[-1])

    def from_rows(self, tensor: Tensor) -> Tensor:
        """Restore the original shape of a rearranged tensor. This is the inverse of `to_rows`."""
        first = self.view[self.dim]
        remaining_lengths = [length for dim, length in enumerate(self.view) if dim != self.dim]
        return tensor.reshape(first, *remaining_lengths).movedim(0, self.dim).reshape(self.shape)

    def get_row_offsets(self, rows: slice) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return the offsets, in the original tensor, of the first elements of these rows."""
        width = 1 if self.is_flat else self.view[-1]
        view = self.view if self.is_flat else self.view[:-1]
        offsets = np.arange(np.prod(view, dtype=np.int64), dtype=np.int64).reshape(view)
        return np.moveaxis(offsets, self.dim, 0).reshape(-1)[rows] * width


@dataclass(frozen=True, slots=True)
class Shard:
    """Consecutive rows of a tensor of shape `shape`, starting at row `first`. A shard can be empty.

    Rows are along dim 0 of the tensor or, if `chunked` is set, of the rearranged tensor. A 0-dim tensor is one row. If
    several ranks hold the same rows, only the `primary` rank reports them.
    """

    tensor: Tensor
    first: int
    shape: torch.Size
    primary: bool = True
    chunked: ChunkLayout | None = None

    def iterate_segments(self) -> Iterator[Segment]:
        """Yield the contiguous segments of the shard in order."""
        elements = self.tensor.numel()
        if not elements:
            return
        if self.chunked is None or self.chunked.dim == 0:  # the rows are contiguous in the full tensor
            width = self.shape[1:].numel() if self.chunked is None else elements // len(self.tensor)
            yield Segment(self.first * width, 0, elements)
            return
        starts = self.chunked.get_row_offsets(slice(self.first, self.first + len(self.tensor)))
        width = elements // len(self.tensor)
        breaks = [0, *(np.flatnonzero(np.diff(starts) != width) + 1).tolist(), len(starts)]
        for begin, end in pairwise(breaks):
            yield Segment(int(starts[begin]), begin * width, (end - begin) * width)


MaybeSharded: TypeAlias = Tensor | Shard  # a Tensor isn't sharded: all ranks hold the full tensor
NamedTensors: TypeAlias = Mapping[str, MaybeSharded]


def make_element_shard(flat: Tensor, first_element: int, shape: torch.Size) -> Shard:
    """Return a shard with the elements `flat` of a tensor of shape `shape`, starting at element `first_element`.

    The tensor must have at least one dim. Each element is treated as a row.
    """
    if len(shape) == 1:
        return Shard(flat, first_element, shape)
    return Shard(flat.unsqueeze(1), first_element, shape, chunked=ChunkLayout(tuple(shape), (*shape, 1), 0))


def get_local_tensor(value: MaybeSharded) -> Tensor:
    """Return the local tensor of a shard, or an unsharded tensor itself."""
    return value.tensor if isinstance(value, Shard) else value


def select_rows(full_tensor: Tensor, like: MaybeSharded) -> Tensor:
    """Return the rows of `full_tensor` that `like` holds. Returns a view unless the rows of `like` are rearranged."""
    if not isinstance(like, Shard) or not like.shape:
        return full_tensor
    rows = full_tensor if like.chunked is None else like.chunked.to_rows(full_tensor)
    return rows[like.first : like.first + len(like.tensor)]


def shard_like(tensor: Tensor, template: MaybeSharded) -> MaybeSharded:
    """Return `tensor` as a shard with the same rows as `template`. Both must have the same local shape."""
    return replace(template, tensor=tensor) if isinstance(template, Shard) else tensor


def get_unsharded_tensors(tensors: NamedTensors) -> dict[str, Tensor]:
    """Return the tensors that aren't sharded."""
    return {name: value for name, value in tensors.items() if not isinstance(value, Shard)}
