"""The sum over the network has the bits of the sum in one process."""

import itertools

import pytest
import torch
import worlds
from torch import Tensor

from lockstep.comm import canonical
from lockstep.comm.canonical import CanonicalSum, add_
from lockstep.comm.carrier import Addressed, Carrier
from lockstep.comm.world import World
from lockstep.core.mesh import DataRank, Mesh
from lockstep.core.order import cut
from lockstep.core.tree import Counter, LeafBlock, blocks, total

CASES = [
    *itertools.product((1, 2, 3, 4, 5, 6, 7, 8, 12, 13), (0, 1, 2, 3, 7, 1000), (torch.float32, torch.float64)),
    *itertools.product((4, 6), (100_003,), (torch.float32,)),
]


def contiguous(size: int) -> list[DataRank]:
    return [DataRank(rank, size) for rank in range(size)]


def leaf(number: int, length: int, dtype: torch.dtype) -> Tensor:
    """Return values of many magnitudes, whose sum depends on its brackets."""
    generator = torch.Generator().manual_seed(number)
    signs = torch.randn(length, generator=generator, dtype=dtype)
    return signs * 10 ** (6 * torch.rand(length, generator=generator, dtype=dtype))


def held(numbers: range, length: int, dtype: torch.dtype) -> dict[LeafBlock, Tensor]:
    counter = Counter(add_)
    for number in numbers:
        counter.push(number, leaf(number, length, dtype))
    return counter.pieces()


def summed(world: World, leaves: int, length: int, dtype: torch.dtype) -> Tensor:
    pieces = held(cut(leaves, world.size)[world.rank], length, dtype)
    return world.canonical(Mesh(world.size), "replicate")(pieces, leaves, torch.empty(length, dtype=dtype))


def all_summed(world: World) -> list[Tensor]:
    return [summed(world, *case) for case in CASES]


@pytest.mark.worlds
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_rank_has_the_bits_of_one_process(size: int) -> None:
    found = worlds.run(size, all_summed)
    for number, (leaves, length, dtype) in enumerate(CASES):
        expected = total(held(range(leaves), length, dtype), leaves, add_)
        for rank in range(size):
            assert found[rank][number].dtype == dtype
            assert torch.equal(found[rank][number], expected), (leaves, length, dtype, rank)


def test_the_values_tell_brackets_apart() -> None:
    """Otherwise the test above could not fail."""
    in_a_row = torch.zeros(1000)
    for number in range(8):
        in_a_row += leaf(number, 1000, torch.float32)
    assert not torch.equal(in_a_row, total(held(range(8), 1000, torch.float32), 8, add_))


@pytest.mark.parametrize(
    ("leaves", "size", "fits"),
    [
        (1, 1, True),
        (2, 2, True),
        (4, 2, True),
        (8, 4, True),
        (16, 4, True),
        (6, 2, False),  # three leaves a rank are two blocks
        (3, 2, False),  # blocks of different sizes
        (3, 3, False),  # no power of two
        (8, 3, False),
        (2, 4, False),  # ranks without a block
    ],
)
def test_halving_is_for_equal_blocks_on_a_power_of_two(leaves: int, size: int, fits: bool) -> None:
    assert canonical._halving_fits([blocks(share) for share in cut(leaves, size)]) is fits


def _counted(world: World, leaves: int, length: int, patch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Return how many numbers this rank sends, and how many it receives."""
    sent = received = 0
    moves = canonical.move

    def counting(carrier: Carrier, leaving: list[Addressed], arriving: list[Addressed]) -> None:
        nonlocal sent, received
        sent += sum(len(tensor) for tensor, _ in leaving)
        received += sum(len(tensor) for tensor, _ in arriving)
        moves(carrier, leaving, arriving)

    patch.setattr(canonical, "move", counting)
    summed(world, leaves, length, torch.float32)
    return sent, received


def traffic(world: World, leaves: int, length: int) -> tuple[int, int]:
    with pytest.MonkeyPatch.context() as patch:
        return _counted(world, leaves, length, patch)


@pytest.mark.worlds
@pytest.mark.parametrize(("size", "leaves"), [(2, 2), (2, 4), (4, 4), (4, 8)])
def test_halving_and_doubling_sends_what_a_ring_would(size: int, leaves: int) -> None:
    share = 2 * (size - 1) * 1024 // size
    assert worlds.run(size, traffic, leaves, 1024) == [(share, share)] * size


@pytest.mark.worlds
def test_direct_exchange_sends_each_piece_once_and_each_sum_once() -> None:
    # 3 ranks, 4 leaves: rank 0 holds (0, 1) as one piece, the others one leaf each; chunks of 300 numbers.
    assert worlds.run(3, traffic, 4, 900) == [(1200, 1200)] * 3
    # 3 ranks, 8 leaves: rank 0 holds (0, 1) and 2, rank 1 holds 3 and (4, 5), rank 2 holds (6, 7).
    assert worlds.run(3, traffic, 8, 900) == [(1800, 1500), (1800, 1500), (1200, 1800)]


def missing(world: World) -> str:
    try:
        world.canonical(Mesh(world.size), "replicate")({}, 2, torch.empty(3))
    except (KeyError, ValueError) as error:
        return type(error).__name__
    return "nothing was raised"


@pytest.mark.worlds
def test_a_rank_that_lacks_its_pieces_is_an_error_not_a_wrong_sum() -> None:
    assert set(worlds.run(2, missing)) <= {"KeyError", "ValueError"}
    assert set(worlds.run(1, missing)) == {"KeyError"}


def test_a_world_of_one_needs_no_group() -> None:
    pieces = {LeafBlock(0, 2): torch.tensor([1.0]), LeafBlock(2, 1): torch.tensor([2.0])}
    assert CanonicalSum(0, contiguous(1), None)(pieces, 3, torch.empty(1)).item() == 3.0
