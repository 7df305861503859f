"""Rows of a tensor, of itself or rearranged in chunks, have their places in the whole, run by run."""

from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lockstep.core.shard import (
    ChunkLayout,
    Segment,
    Shard,
    get_local_tensor,
    get_unsharded_tensors,
    make_element_shard,
    select_rows,
    shard_like,
)


@st.composite
def plain_rows(draw: st.DrawFn) -> tuple[Tensor, Shard]:
    shape = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    first = draw(st.integers(0, shape[0]))
    length = draw(st.integers(0, shape[0] - first))
    whole = torch.arange(float(prod(shape))).reshape(shape)
    return whole, Shard(whole[first : first + length], first, whole.shape)


@st.composite
def chunked_rows(draw: st.DrawFn) -> tuple[Tensor, Shard]:
    view = tuple(draw(st.lists(st.integers(1, 4), min_size=2, max_size=4)))
    dim = draw(st.integers(0, len(view) - 2))
    shape = (prod(view),) if draw(st.booleans()) else (prod(view[:-1]), view[-1])
    chunked = ChunkLayout(shape, view, dim)
    whole = torch.arange(float(prod(view))).reshape(shape)
    rows = chunked.to_rows(whole)
    first = draw(st.integers(0, len(rows)))
    length = draw(st.integers(0, len(rows) - first))
    return whole, Shard(rows[first : first + length], first, whole.shape, chunked=chunked)


@st.composite
def pieces(draw: st.DrawFn) -> tuple[Tensor, Shard]:
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    whole = torch.arange(float(prod(shape))).reshape(shape)
    first = draw(st.integers(0, whole.numel()))
    length = draw(st.integers(0, whole.numel() - first))
    return whole, make_element_shard(whole.flatten()[first : first + length], first, whole.shape)


@given(plain_rows() | chunked_rows() | pieces())
def test_runs_put_rows_where_they_are_in_the_whole(drawn: tuple[Tensor, Shard]) -> None:
    whole, shard = drawn
    own = shard.tensor.reshape(-1)
    found = torch.full((whole.numel(),), -1.0)
    taken = 0
    for run in shard.iterate_segments():
        assert run.local_offset == taken  # in the order of the rows
        found[run.offset : run.offset + run.length] = own[run.local_offset : run.local_offset + run.length]
        taken += run.length
    assert taken == own.numel()
    assert torch.equal(select_rows(found.reshape(whole.shape), shard), shard.tensor)
    assert int((found < 0).sum()) == whole.numel() - taken


@given(chunked_rows())
def test_what_is_rearranged_can_be_restored(drawn: tuple[Tensor, Shard]) -> None:
    whole, shard = drawn
    assert torch.equal(shard.chunked.from_rows(shard.chunked.to_rows(whole)), whole)


def test_golden_runs() -> None:
    shape = torch.Size((2, 3, 4))
    assert list(Shard(torch.empty(1, 3, 4), 1, shape).iterate_segments()) == [Segment(12, 0, 12)]
    assert list(Shard(torch.empty(0, 3, 4), 2, shape).iterate_segments()) == []
    assert list(Shard(torch.empty(()), 0, torch.Size(())).iterate_segments()) == [Segment(0, 0, 1)]


def test_golden_chunks() -> None:
    """Of 3 x 4 outputs of 2 inputs in 2 chunks: the second has the last two of each of the three."""
    outputs = ChunkLayout((12, 2), (3, 2, 2, 2), 1)
    rows = Shard(torch.empty(6, 2), 6, torch.Size((12, 2)), chunked=outputs)
    assert list(rows.iterate_segments()) == [Segment(4, 0, 4), Segment(12, 4, 4), Segment(20, 8, 4)]
    inputs = ChunkLayout((2, 6), (2, 3, 2), 1)  # of 6 inputs in 3 chunks: each row of the weight is cut
    assert inputs.to_rows(torch.arange(12.0).reshape(2, 6))[:2].tolist() == [[0.0, 1.0], [6.0, 7.0]]


def test_what_is_like_a_shard_is_the_same_rows() -> None:
    shard = Shard(torch.zeros(2, 5), 1, torch.Size((4, 5)), primary=False)
    other = torch.ones(2, 5)
    rows = shard_like(other, shard)
    assert isinstance(rows, Shard)
    assert rows.tensor is other
    assert (rows.first, rows.shape, rows.primary) == (1, torch.Size((4, 5)), False)
    assert shard_like(other, torch.zeros(2, 1)) is other
    assert get_local_tensor(shard) is shard.tensor
    assert get_unsharded_tensors({"cut": shard, "whole": other}) == {"whole": other}
