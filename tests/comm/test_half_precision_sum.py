"""A sum in 16 bits is alike on all ranks, near the true one by what its roundings allow, and that of one rank exact."""

import pytest
import torch
import worlds
from posted import held
from torch import Tensor

from lockstep.comm.canonical import HalfPrecisionSum
from lockstep.comm.world import World
from lockstep.core.mesh import Mesh
from lockstep.core.order import split_range
from lockstep.core.tolerance import compute_unit_roundoff, compute_worst_case_bound

pytestmark = pytest.mark.slow("several ranks")

LENGTH = 1001
LEAVES = (2, 4, 5, 8)  # with 2, some ranks have none
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def leaf(number: int) -> Tensor:
    return torch.randn(LENGTH, generator=torch.Generator().manual_seed(number))


def summed(world: World, leaves: int, dtype: torch.dtype) -> Tensor:
    add = HalfPrecisionSum(world.make_canonical_sum(Mesh(world.size), "replicate"), dtype)
    return add(held(split_range(leaves, world.size)[world.rank], leaf), leaves, torch.empty(LENGTH))


def all_summed(world: World) -> list[Tensor]:
    return [summed(world, leaves, dtype) for leaves in LEAVES for dtype in DTYPES.values()]


@pytest.mark.worlds
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_sum_in_16_bits(size: int) -> None:
    found = worlds.run(size, all_summed)
    for number, (leaves, precision) in enumerate((leaves, precision) for leaves in LEAVES for precision in DTYPES):
        first, *others = [each[number] for each in found]
        assert first.dtype == torch.float32
        assert all(torch.equal(first, other) for other in others)
        terms = torch.stack([leaf(number).double() for number in range(leaves)])
        # One rank sends nothing; several round what they send, and each addition after that.
        roundoff = compute_unit_roundoff("fp32" if size == 1 else precision)
        allowed = compute_worst_case_bound(roundoff, leaves if size == 1 else size) + compute_worst_case_bound(
            compute_unit_roundoff("fp32"), leaves
        )
        apart = (first.double() - terms.sum(0)).abs() / terms.abs().sum(0)
        assert float(apart.max()) <= allowed
        assert size == 1 or float(apart.max()) > compute_worst_case_bound(compute_unit_roundoff("fp32"), leaves)
