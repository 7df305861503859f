"""The sum over the network has the bits of the sum in one process."""

import itertools
from functools import partial
from typing import get_args

import pytest
import torch
import worlds
from posted import Post, summed
from posted import held as pieces_of
from torch import Tensor

from lockstep.comm.canonical import CanonicalSum, add_
from lockstep.comm.world import World
from lockstep.core.mesh import Axis, DataRank, Mesh
from lockstep.core.order import split_range
from lockstep.core.reduction import FAN_OUT
from lockstep.core.tree import LeafBlock, sum_pieces

CASES = [
    *itertools.product((1, 2, 3, 4, 5, 6, 7, 8, 12, 13), (0, 1, 2, 3, 7, 1000), (torch.float32, torch.float64)),
    *itertools.product((4, 6), (100_003,), (torch.float32,)),
]


def leaf(number: int, length: int, dtype: torch.dtype) -> Tensor:
    """Return values of many magnitudes, whose sum depends on its brackets."""
    generator = torch.Generator().manual_seed(number)
    signs = torch.randn(length, generator=generator, dtype=dtype)
    return signs * 10 ** (6 * torch.rand(length, generator=generator, dtype=dtype))


def held(numbers: range, length: int, dtype: torch.dtype) -> dict[LeafBlock, Tensor]:
    return pieces_of(numbers, partial(leaf, length=length, dtype=dtype))


def added(world: World, leaves: int, length: int, dtype: torch.dtype) -> Tensor:
    pieces = held(split_range(leaves, world.size)[world.rank], length, dtype)
    return world.make_canonical_sum(Mesh(world.size), "replicate")(pieces, leaves, torch.empty(length, dtype=dtype))


def all_added(world: World) -> list[Tensor]:
    return [added(world, *case) for case in CASES]


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_rank_has_the_bits_of_one_process(size: int) -> None:
    found = worlds.run(size, all_added)
    for number, (leaves, length, dtype) in enumerate(CASES):
        expected = sum_pieces(held(range(leaves), length, dtype), leaves, add_)
        for rank in range(size):
            assert found[rank][number].dtype == dtype
            assert torch.equal(found[rank][number], expected), (leaves, length, dtype, rank)


def test_the_values_tell_brackets_apart() -> None:
    """Otherwise the test above could not fail."""
    in_a_row = torch.zeros(1000)
    for number in range(8):
        in_a_row += leaf(number, 1000, torch.float32)
    assert not torch.equal(in_a_row, sum_pieces(held(range(8), 1000, torch.float32), 8, add_))


MORE_RANKS = pytest.mark.slow("more ranks of the same tree")
MESHES = [
    *(Mesh(replicate=size) for size in range(2, 9)),
    *(pytest.param(Mesh(replicate=size), marks=MORE_RANKS) for size in range(9, 14)),
    *(Mesh(shard=size) for size in (2, 3, 5)),
    *(Mesh(context=size) for size in (2, 4)),
    *(Mesh(replicate=2, shard=3), Mesh(replicate=3, context=2), Mesh(replicate=3, expert=2)),
]


def posted(mesh: Mesh, axes: tuple[Axis, ...], leaves: int, length: int, chunks: int = 1) -> tuple[list[Tensor], Post]:
    return summed(mesh, axes, leaves, partial(leaf, length=length, dtype=torch.float32), chunks)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_ranks_of_any_number_and_mesh_have_the_bits_of_one_process(mesh: Mesh) -> None:
    axes = tuple(axis for axis in get_args(Axis) if getattr(mesh, axis) > 1 and axis != "expert")
    chunks = mesh.context
    for microbatches, length in itertools.product((1, 2, 3, mesh.size, mesh.size + 1, 2 * mesh.size, 22), (1, 5, 997)):
        leaves = microbatches * chunks
        expected = sum_pieces(held(range(leaves), length, torch.float32), leaves, add_)
        for rank, found in enumerate(posted(mesh, axes, leaves, length, chunks)[0]):
            assert torch.equal(found, expected), (microbatches, length, rank)


@pytest.mark.parametrize(
    ("size", "leaves"), [(4, 4), (3, 6), (5, 5), (7, 14), (12, 24), (33, 33), (64, 1), (64, 3), (65, 65)]
)
def test_a_rank_sends_about_two_vectors_to_few_others(size: int, leaves: int) -> None:
    length = 64 * size
    _, post = posted(Mesh(size), ("replicate",), leaves, length)
    assert max(*post.sent.values(), *post.received.values()) <= 2.1 * length
    assert post.neighbors() <= min(size - 1, 2 * size.bit_length() + FAN_OUT)


@pytest.mark.parametrize(("size", "leaves"), [(2, 2), (2, 4), (3, 3), (3, 4), (3, 6), (4, 4), (4, 8), (8, 8)])
def test_of_one_block_a_rank_sends_what_it_would_in_a_ring(size: int, leaves: int) -> None:
    _, post = posted(Mesh(size), ("replicate",), leaves, 120 * size)
    assert post.sent == dict.fromkeys(range(size), 2 * (size - 1) * 120)


def test_of_a_block_more_on_both_sides_half_is_sent_more() -> None:
    # 6 leaves: rank 0 holds (0, 1) and 2, rank 1 holds 3 and (4, 5). Of each block one half moves, then of the sum.
    assert posted(Mesh(2), ("replicate",), 6, 1200)[1].sent == {0: 1800, 1: 1800}


def missing(world: World) -> str:
    try:
        world.make_canonical_sum(Mesh(world.size), "replicate")({}, 2, torch.empty(3))
    except (KeyError, ValueError) as error:
        return type(error).__name__
    return "nothing was raised"


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
def test_a_rank_that_lacks_its_pieces_is_an_error_not_a_wrong_sum() -> None:
    assert set(worlds.run(2, missing)) <= {"KeyError", "ValueError"}
    assert set(worlds.run(1, missing)) == {"KeyError"}


def test_a_world_of_one_needs_no_group() -> None:
    pieces = {LeafBlock(0, 2): torch.tensor([1.0]), LeafBlock(2, 1): torch.tensor([2.0])}
    assert CanonicalSum(0, [DataRank()], None)(pieces, 3, torch.empty(1)).item() == 3.0
