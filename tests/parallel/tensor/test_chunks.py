"""A region is called once for each chunk, whose random numbers are its own, and the rest of the model sees one call."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.parallel.tensor.chunks import Region as ChunkedRegion
from lockstep.parallel.tensor.plan import split_into_chunks


class Region(nn.Module):
    """Notes what its inside sees."""

    def __init__(self, inside: Callable[[Tensor], Tensor] = torch.relu) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.last = nn.Linear(8, 6)
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inside(self.first(x)))


def cut(region: nn.Module, count: int) -> nn.Module:
    split_into_chunks(region, {"first": "colwise", "last": "rowwise"}, count)
    return region


def shared(region: nn.Module, rank: int, ranks: int) -> nn.Module:
    """Leave a region the chunks of one rank; nothing adds over ranks here."""
    chunks = region.first.region
    chunks.distribute(rank, ranks, Alone(chunks))
    for layer in (region.first, region.last):
        layer.weight = nn.Parameter(layer.weight.detach().tensor_split(ranks)[rank].clone())
    region.first.bias = nn.Parameter(region.first.bias.detach().tensor_split(ranks)[rank].clone())
    return region


class Alone:
    """In place of the sum over ranks: this rank's own part of it."""

    def __init__(self, chunks: ChunkedRegion) -> None:
        self._chunks = chunks

    def __call__(self, pieces: Any, leaves: int, like: Tensor) -> Tensor:
        assert leaves == self._chunks.num_chunks
        return torch.stack(list(pieces.values())).sum(0)


def test_the_inside_sees_one_chunk_at_a_time_whoever_has_them() -> None:
    seen: list[Tensor] = []

    def inside(x: Tensor) -> Tensor:
        seen.append(x.detach().clone())
        return x.relu()

    torch.manual_seed(0)
    whole = cut(Region(inside), 4)
    x = torch.randn(3, 6)
    whole(x)
    of_all = [*seen]
    assert [each.shape for each in of_all] == [(3, 2)] * 4
    for rank in (0, 1):
        seen.clear()
        torch.manual_seed(0)
        shared(cut(Region(inside), 4), rank, 2)(x)
        assert [torch.equal(one, other) for one, other in zip(seen, of_all[2 * rank :], strict=False)] == [True, True]


def drawn(ranks: int, rank: int, seen: list[Tensor], training: bool = True) -> Tensor:
    """Return what a model draws after a region that draws at all three places; note what chunks drew."""

    def inside(x: Tensor) -> Tensor:
        dropped = F.dropout(torch.ones_like(x), 0.5, training)
        seen.append(dropped)
        return x * dropped

    torch.manual_seed(1)
    region = cut(Region(inside), 4).train(training)
    if ranks > 1:
        shared(region, rank, ranks)
    torch.manual_seed(2)
    before = F.dropout(torch.ones(5), 0.5)
    region(before.new_ones(7, 6))
    return torch.cat([before, torch.rand(3)])


def test_each_chunk_draws_its_own_numbers_and_what_follows_does_not_notice() -> None:
    of_one: list[Tensor] = []
    after = drawn(1, 0, of_one)
    assert len({each.numpy().tobytes() for each in of_one}) == 4  # no two chunks draw alike
    for rank in range(2):
        own: list[Tensor] = []
        assert torch.equal(drawn(2, rank, own), after)
        assert all(torch.equal(one, other) for one, other in zip(own, of_one[2 * rank :], strict=False))


def test_an_evaluation_draws_nothing() -> None:
    torch.manual_seed(2)
    F.dropout(torch.ones(5), 0.5)
    expected = torch.rand(3)
    assert torch.equal(drawn(1, 0, [], training=False)[5:], expected)


def test_what_is_drawn_before_the_first_layer_is_drawn_once() -> None:
    class Before(Region):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(F.dropout(x, 0.5) + noted(torch.rand(1)))

    values: list[float] = []

    def noted(x: Tensor) -> Tensor:
        values.append(x.item())
        return x

    cut(Before(), 4)(torch.ones(2, 6))
    assert len(values) == 4
    assert len(set(values)) == 1


def test_a_region_that_failed_can_be_called_again() -> None:
    def inside(x: Tensor) -> Tensor:
        if fail:
            raise ValueError("of the user's own")
        return x

    region = cut(Region(inside), 2)
    fail = True
    with pytest.raises(ValueError, match="of the user's own"):
        region(torch.ones(2, 6))
    fail = False
    assert torch.equal(region(torch.ones(2, 6)), region(torch.ones(2, 6)))


def test_a_region_whose_last_layer_is_not_called_says_so() -> None:
    class Left(Region):
        def forward(self, x: Tensor) -> Tensor:
            return self.first(x)

    with pytest.raises(RuntimeError, match="the model was called without its rowwise layer, so it cannot be split"):
        cut(Left(), 2)(torch.ones(2, 6))


@pytest.mark.parametrize("layer", ["first", "last"])
def test_a_layer_that_is_called_from_elsewhere_says_so(layer: str) -> None:
    region = cut(Region(), 2)
    with pytest.raises(
        RuntimeError, match="layer of the model was called from outside the model, so the model cannot be split"
    ):
        region.get_submodule(layer)(torch.ones(2, 6 if layer == "first" else 4))
