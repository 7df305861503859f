"""A multiple is added in 16 bits alike at each place of a tensor: otherwise rows of it would have other bits."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor

from lockstep.parallel.sixteen_bit_updates import PositionIndependentMode

SIZE = 37  # some vectors, and some elements over
ADDS: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda left, right: left.add_(right, alpha=-0.0321),
    lambda left, right: left.add(right, alpha=-0.0321),
    lambda left, right: torch._foreach_add([left], [right], alpha=-0.0321)[0],
    lambda left, right: (torch._foreach_add_([left], [right], alpha=-0.0321), left)[1],
]


def _sums(add: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype, cut: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(100, SIZE, generator=generator).to(dtype) for _ in range(2))
    parts = zip(left.split(cut, dim=1), right.split(cut, dim=1), strict=True)
    return torch.cat([torch.stack([add(*row) for row in zip(*part, strict=True)]) for part in parts], dim=1)


def _alike(around: AbstractContextManager[object], dtype: torch.dtype, add: Callable[[Tensor, Tensor], Tensor]) -> bool:
    with around:
        whole = _sums(add, dtype, SIZE)
        return all(torch.equal(_sums(add, dtype, cut), whole) for cut in (1, 5, 30))


@pytest.mark.parametrize("add", ADDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_sum_does_not_depend_on_its_place(dtype: torch.dtype, add: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert _alike(PositionIndependentMode(), dtype, add)
    assert not _alike(nullcontext(), dtype, add)  # once torch's own are alike, this module can go


def test_other_sums_are_torchs_own() -> None:
    left, right = torch.randn(2, SIZE)
    with PositionIndependentMode():
        wide, plain = left.add(right, alpha=0.3), left.half().add(right.half())
    assert torch.equal(wide, left.add(right, alpha=0.3))
    assert torch.equal(plain, left.half().add(right.half()))
