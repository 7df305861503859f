"""Sums are exact for whole numbers and rounded once for others, on any number of ranks, with and without batches."""

import math

import pytest
import torch
import worlds
from torch import Tensor

from lockstep.comm.named_sums import NamedSums
from lockstep.comm.world import World

pytestmark = [pytest.mark.slow("several ranks"), pytest.mark.worlds]
VALUES = [1e16, 1.0, -1e16, 3.0, 0.1]


def total(world: World, count: int) -> dict[str, Tensor]:
    """Add the first `count` values, dealt out to the ranks; whole numbers are a matrix."""
    sums = NamedSums()
    for number in range(world.rank, count, world.size):
        sums.add(
            number, {"value": torch.tensor(VALUES[number]), "whole": torch.full((2, 2), number, dtype=torch.uint8)}
        )
        sums.add(number, {"value": torch.tensor(99.0), "whole": torch.zeros(2, 2)})  # done again: it does not count
    return sums.compute_total(world, count)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [2, 5])
def test_all_ranks_get_the_same(size: int, count: int) -> None:
    expected = math.fsum(torch.tensor(VALUES[:count]).double().tolist())
    for found in worlds.run(size, total, count):
        assert found["value"].item() == expected
        assert found["whole"].tolist() == [[sum(range(count))] * 2] * 2
        assert found["whole"].dtype == torch.int64


def test_nothing_to_add_is_nothing() -> None:
    assert worlds.run(2, total, 0) == [{}, {}]
