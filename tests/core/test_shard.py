"""A slice along any dim has its place in the whole, run by run."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lockstep.core.shard import Run, Shard, local_tensor, sharded_as, slice_of, unsharded


@st.composite
def slices(draw: st.DrawFn) -> tuple[Tensor, Shard]:
    shape = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    dim = draw(st.integers(0, len(shape) - 1))
    first = draw(st.integers(0, shape[dim]))
    length = draw(st.integers(0, shape[dim] - first))
    whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    return whole, Shard(whole.narrow(dim, first, length), first, whole.shape, dim=dim)


@given(slices())
def test_runs_put_a_slice_where_it_is_in_the_whole(drawn: tuple[Tensor, Shard]) -> None:
    whole, shard = drawn
    own = shard.tensor.reshape(-1)
    found = torch.full((whole.numel(),), -1.0)
    taken = 0
    for run in shard.runs():
        assert run.own == taken  # in the order of the slice
        found[run.at : run.at + run.length] = own[run.own : run.own + run.length]
        taken += run.length
    assert taken == own.numel()
    assert torch.equal(slice_of(found.reshape(whole.shape), shard), shard.tensor)
    assert int((found < 0).sum()) == whole.numel() - taken


def test_golden_runs() -> None:
    shape = torch.Size((2, 3, 4))
    assert list(Shard(torch.empty(1, 3, 4), 1, shape).runs()) == [Run(12, 0, 12)]
    assert list(Shard(torch.empty(2, 2, 4), 1, shape, dim=1).runs()) == [Run(4, 0, 8), Run(16, 8, 8)]
    assert list(Shard(torch.empty(0, 3, 4), 2, shape).runs()) == []
    assert list(Shard(torch.empty(()), 0, torch.Size(())).runs()) == [Run(0, 0, 1)]


def test_what_is_like_a_shard_is_the_same_slice() -> None:
    shard = Shard(torch.zeros(2, 1), 3, torch.Size((2, 5)), primary=False, dim=1)
    other = torch.ones(2, 1)
    assert sharded_as(other, shard) == Shard(other, 3, torch.Size((2, 5)), False, 1)
    assert sharded_as(other, torch.zeros(2, 1)) is other
    assert local_tensor(shard) is shard.tensor
    assert unsharded({"cut": shard, "whole": other}) == {"whole": other}
