"""The norm is that of all elements, and no row's part of it depends on which other rows are there."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.core import norm
from lockstep.core.norm import clip_, compute_folded_norms, compute_row_norms, compute_total_norm

SHAPES = [
    (1,),
    (7,),
    (64,),
    (5, 1),
    (5, 3),
    (8, 16),
    (3, 1000),
    (33, 4097),
    (6, 3, 3, 3),
    (16, 8, 1, 1),
    (4, 0),
    (2, 2, 70000),
]


def _gradient(shape: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=dtype) * torch.rand(shape, generator=generator) ** 8


def _folded(tensor: Tensor) -> Tensor:
    return compute_folded_norms([tensor.reshape(len(tensor), math.prod(tensor.shape[1:]))])[0]


# That of the CPU, and that of CUDA, which goes anywhere.
WAYS = pytest.mark.parametrize(
    "norms_of", [lambda tensor: compute_row_norms([tensor])[0], _folded], ids=["kernel", "folded"]
)
Way = Callable[[Tensor], Tensor]


def _total_norm(tensors: list[Tensor]) -> Tensor:
    return compute_total_norm(torch.cat(compute_row_norms(tensors)))


@WAYS
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_row_has_its_norm_whatever_other_rows_are_there(
    shape: tuple[int, ...], dtype: torch.dtype, norms_of: Way
) -> None:
    whole = _gradient(shape).to(dtype)
    norms = norms_of(whole)
    assert norms.shape == (shape[0],)
    for parts in (2, 3, shape[0]):
        pieces = [norms_of(part.clone()) for part in whole.tensor_split(parts)]
        assert torch.equal(torch.cat(pieces), norms)


@WAYS
@given(st.lists(st.integers(1, 40), min_size=1, max_size=3), st.data())
@settings(deadline=None, max_examples=200)
def test_rows_of_any_shape(norms_of: Way, shape: list[int], data: st.DataObject) -> None:
    whole = _gradient((*shape,), data.draw(st.integers(0, 100)))
    start = data.draw(st.integers(0, shape[0]))
    stop = data.draw(st.integers(start, shape[0]))
    assert torch.equal(norms_of(whole[start:stop].clone()), norms_of(whole)[start:stop])


@WAYS
def test_memory_format_changes_no_bit(norms_of: Way) -> None:
    whole = _gradient((16, 24, 3, 3))
    assert torch.equal(norms_of(whole.contiguous(memory_format=torch.channels_last)), norms_of(whole))


@pytest.mark.parametrize("at_once", [1, 200, 1 << 20])
def test_many_tensors_are_folded_as_each_alone(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm, "_MAX_FOLDED_ELEMENTS", at_once)
    dtypes = [torch.float32, torch.bfloat16, torch.float64]
    tensors = [_gradient((rows, 24), rows).to(dtypes[rows % 3]) for rows in range(6)]
    tensors += [_gradient((5, 8), 1), _gradient((0, 24)), _gradient((3, 0))]
    before = [each.clone() for each in tensors]
    for found, tensor in zip(compute_folded_norms(tensors), tensors, strict=True):
        assert torch.equal(found, compute_folded_norms([tensor])[0])
    assert all(map(torch.equal, tensors, before))


@pytest.mark.slow("needs a card")
@pytest.mark.gpu
@pytest.mark.parametrize("width", [1, 27, 576, 768, 3072, 100_000])
def test_on_a_card_no_row_s_norm_depends_on_other_rows_or_on_where_it_begins(width: int) -> None:
    whole = _gradient((33, width)).cuda()
    expected = compute_row_norms([whole])[0]
    for start, stop in ((0, 1), (1, 2), (3, 20), (32, 33)):
        memory = torch.empty(whole[start:stop].numel() + 3, device="cuda")
        for offset in range(4):
            rows = memory[offset : offset + whole[start:stop].numel()].view(-1, width).copy_(whole[start:stop])
            assert torch.equal(compute_row_norms([rows])[0], expected[start:stop])
    torch.testing.assert_close(expected, torch.linalg.vector_norm(whole.double(), dim=1), rtol=1e-6, atol=0.0)


@WAYS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_against_the_norm_in_float64(dtype: torch.dtype, norms_of: Way) -> None:
    tensors = [_gradient(shape, seed).to(dtype) for seed, shape in enumerate([*SHAPES, (1, 1)])]
    expected = torch.linalg.vector_norm(torch.cat([tensor.double().flatten() for tensor in tensors]))
    found = compute_total_norm(torch.cat([norms_of(tensor) for tensor in tensors]))
    assert found.dtype == torch.float64
    assert found.ndim == 0
    torch.testing.assert_close(found, expected, rtol=_rounding(dtype), atol=0.0)


def _rounding(dtype: torch.dtype) -> float:
    """Return what errors of either sign add up to in the longest row: as the square root of its length."""
    longest = max(math.prod(shape[1:]) for shape in SHAPES)
    return math.sqrt(longest) * torch.finfo(torch.promote_types(dtype, torch.float32)).eps


def test_a_golden_norm() -> None:
    assert _total_norm([torch.tensor([[3.0, 0.0], [0.0, 4.0]]), torch.tensor(12.0)]).item() == 13.0


def test_no_rows_have_no_norms() -> None:
    assert compute_row_norms([torch.empty(0, 3)])[0].shape == (0,)
    assert _total_norm([torch.empty(0), torch.tensor([2.0])]).item() == 2.0


def test_clipping_scales_to_the_limit() -> None:
    tensors = [_gradient((8, 16)), _gradient((5,), seed=1)]
    before = [tensor.clone() for tensor in tensors]
    norm = _total_norm(tensors)
    clip_(tensors, norm, 0.25 * norm.item())
    for clipped, original in zip(tensors, before, strict=True):
        torch.testing.assert_close(clipped, original * 0.25)


@pytest.mark.parametrize("factor", [1.0, 1.5, float("inf")])
def test_what_is_small_enough_stays_to_the_bit(factor: float) -> None:
    tensors = [_gradient((8, 16))]
    before = tensors[0].clone()
    norm = _total_norm(tensors)
    clip_(tensors, norm, norm.item() * factor)
    assert torch.equal(tensors[0], before)


def test_a_gradient_of_zeros_stays_one() -> None:
    tensors = [torch.zeros(3)]
    clip_(tensors, _total_norm(tensors), 1.0)
    assert torch.equal(tensors[0], torch.zeros(3))
