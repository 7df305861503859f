"""SequenceChunks that exchange tensors get the same elements whoever has which chunk, and their gradients go back."""

import pytest
import torch
import worlds
from torch import Tensor

from lockstep.comm.world import World
from lockstep.core.mesh import Mesh
from lockstep.parallel.context.exchange import Exchange

CHUNKS = 4


def _given(chunks: range) -> list[tuple[Tensor, Tensor]]:
    """Return two tensors for each of these chunks, of other widths, whose elements say where they come from."""
    shape = (2, CHUNKS, 3)
    firsts = [torch.arange(24.0).reshape(shape) + 1000 * chunk for chunk in chunks]
    return [(first, torch.cat([-first, first], 2)) for first in firsts]


def _exchanged(exchange: Exchange, own: range) -> tuple[list[tuple[Tensor, ...]], list[Tensor]]:
    """Return what the chunks `own` get, and the gradients of what they give."""
    given = [tuple(each.requires_grad_() for each in tensors) for tensors in _given(own)]
    results = exchange(given, 1, 2)
    torch.stack([(result * result).sum() for of_chunk in results for result in of_chunk]).sum().backward()
    gradients = [each.grad for tensors in given for each in tensors if each.grad is not None]
    return [tuple(each.detach() for each in of_chunk) for of_chunk in results], gradients


def test_each_seat_gets_its_part_of_what_all_give() -> None:
    results, gradients = _exchanged(Exchange(CHUNKS), range(CHUNKS))
    for chunk, of_chunk in enumerate(results):
        for kind, result in enumerate(of_chunk):
            parts = [tensors[kind][:, chunk : chunk + 1] for tensors in _given(range(CHUNKS))]
            assert torch.equal(result, torch.cat(parts, 2))
            assert result.is_contiguous()
    for gradient, tensor in zip(
        gradients, [each for tensors in _given(range(CHUNKS)) for each in tensors], strict=True
    ):
        assert torch.equal(gradient, 2 * tensor)


def test_the_exchange_the_other_way_brings_all_back() -> None:
    exchange, given = Exchange(CHUNKS), _given(range(CHUNKS))
    back = exchange(exchange(given, 1, 2), 2, 1)
    assert all(torch.equal(*pair) for pair in zip(sum(back, ()), sum(given, ()), strict=True))


def _on_rank(world: World) -> tuple[list[tuple[Tensor, ...]], list[Tensor]]:
    carrier = world.make_carrier(Mesh(context=world.size), "context", side_stream=False)
    own = CHUNKS // world.size
    exchange = Exchange(CHUNKS, world.rank, world.size, carrier)
    return _exchanged(exchange, range(world.rank * own, (world.rank + 1) * own))


@pytest.mark.worlds
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow("several ranks"))])
def test_it_does_not_matter_which_process_has_a_seat(size: int) -> None:
    results, gradients = _exchanged(Exchange(CHUNKS), range(CHUNKS))
    answers = worlds.run(size, _on_rank)
    found = [each for of_rank, _ in answers for of_chunk in of_rank for each in of_chunk]
    assert all(torch.equal(*pair) for pair in zip(found, sum(results, ()), strict=True))
    assert all(torch.equal(*pair) for pair in zip([each for _, own in answers for each in own], gradients, strict=True))
