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


def _total_of(world: World, batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Sum `batches`, which are dealt out to the ranks."""
    sums = NamedSums()
    for number in range(world.rank, len(batches), world.size):
        sums.add(number, batches[number])
    return sums.compute_total(world, len(batches))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_batch_may_have_no_value_of_a_name(size: int) -> None:
    """In this order of the batches, whatever rank has them: such as a count of each class that occurs in a batch."""
    batches = [
        {"class 2": torch.tensor(3), "loss": torch.tensor(0.5)},
        {"class 0": torch.tensor([1, 2]), "extra loss": torch.tensor(0.1)},
        {},
        {"class 2": torch.tensor(4), "extra loss": torch.tensor(0.2), "class 1": torch.tensor(5)},
    ]
    for found in worlds.run(size, _total_of, batches):
        assert [*found] == ["class 2", "class 0", "class 1", "loss", "extra loss"]
        assert found["class 2"].item() == 7
        assert found["class 0"].tolist() == [1, 2]
        assert found["class 1"].item() == 5
        assert found["loss"].item() == 0.5
        assert found["extra loss"].item() == math.fsum(torch.tensor([0.1, 0.2]).double().tolist())


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("values", [[0, 0.5, 1, 0.25], [0.5, 0, 0.25, 1], [1, 1, 1, 0.5, 0.5, 0.5, 0.5]])
def test_a_name_may_be_whole_in_some_batches_only(size: int, values: list[float]) -> None:
    for found in worlds.run(size, _total_of, [{"value": torch.tensor(value)} for value in values]):
        assert found["value"].item() == sum(values)
        assert found["value"].dtype == torch.float64


@pytest.mark.parametrize("size", [1, 2])
def test_values_of_a_name_have_one_shape(size: int) -> None:
    batches = [{"hits": torch.zeros(3, dtype=torch.int64)}, {"hits": torch.tensor(1)}]
    with pytest.raises(Exception, match=r"the values of hits have shape \[3\] in one batch, and \[\] in another"):
        worlds.run(size, _total_of, batches)
