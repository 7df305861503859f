"""Attention whose queries, keys and values come in chunks attends to whole sequences, or says why it cannot."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from lockstep.common.user_code import UserCode
from lockstep.errors import UsageError, UserCodeError
from lockstep.parallel.context.attention import SequenceAttention
from lockstep.parallel.context.exchange import Exchange
from lockstep.parallel.cooperative import CooperativeScheduler

CHUNKS, LENGTH = 2, 8


def _tensors(heads: tuple[int, int, int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(3, count, LENGTH, 6, generator=generator, dtype=torch.float64, requires_grad=True)
        for count in heads
    ]


def _in_chunks(function: Callable[..., Any], tensors: list[Tensor]) -> list[Any]:
    """Call `function` for each chunk of the positions of these tensors, within the context."""
    together = CooperativeScheduler([torch.default_generator])

    def of(number: int) -> Any:
        with SequenceAttention(Exchange(CHUNKS), together) as attention:
            found = function(*(each.chunk(CHUNKS, 2)[number] for each in tensors))
        attention.check()
        return found

    return together.run([partial(of, number) for number in range(CHUNKS)], lambda _: None)


@pytest.mark.parametrize("heads", [(4, 4, 4), (4, 2, 2)])
@pytest.mark.parametrize("causal", [True, False])
def test_it_is_attention_to_all_positions(heads: tuple[int, int, int], causal: bool) -> None:
    attend = partial(F.scaled_dot_product_attention, is_causal=causal, scale=0.3, enable_gqa=heads[0] != heads[1])
    whole, cut = _tensors(heads), _tensors(heads)
    expected, found = attend(*whole), torch.cat(_in_chunks(attend, cut), 2)
    assert (expected - found).abs().max() < 1e-12
    for outputs in (expected, found):
        (outputs * outputs.detach().sin()).sum().backward()
    for one, other in zip(whole, cut, strict=True):
        assert (one.grad - other.grad).abs().max() < 1e-12


def _masked(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, torch.ones(query.shape[2], key.shape[2]).bool())


def _to_fewer(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key[:, :, :2], value[:, :, :2])


def _by_module(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    attention = nn.MultiheadAttention(6, 2, batch_first=True, dtype=torch.float64)
    return attention(*(each[:, 0] for each in (query, key, value)))[0]


def _written_out(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key.transpose(-1, -2)).softmax(-1) @ value


@pytest.mark.parametrize(
    ("function", "heads", "problem"),
    [
        (F.scaled_dot_product_attention, (6, 3, 3), "2 does not divide the 6 and 3 heads of queries, keys and"),
        (F.scaled_dot_product_attention, (6, 3, 3), "values; use 1, 3"),
        (_masked, (2, 2, 2), "passes a mask to torch's attention, but the mask only covers one chunk"),
        (_to_fewer, (2, 2, 2), "of one chunk, got shapes [3, 2, 4, 6], [3, 2, 2, 6], [3, 2, 2, 6]; change"),
        (_by_module, (2, 2, 2), "the model has a torch.nn.MultiheadAttention"),
        (_written_out, (2, 2, 2), "does not call torch.nn.functional.scaled_dot_product_attention"),
    ],
)
def test_what_it_cannot_do_is_refused(function: Any, heads: tuple[int, int, int], problem: str) -> None:
    with pytest.raises(UsageError, match=re.escape(problem)):
        _in_chunks(function, _tensors(heads))


def test_what_torch_refuses_is_reported_as_the_models() -> None:
    def wrong(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.linear(query, torch.zeros(2, 5, dtype=query.dtype))

    with (
        pytest.raises(UserCodeError, match=r"model: RuntimeError: .*test_attention.py:\d+"),
        UserCode("model", shared=True),
    ):
        _in_chunks(wrong, _tensors((2, 2, 2)))


def test_what_has_no_values_is_not_exchanged() -> None:
    """A stage of a pipeline runs the code of those before it for the shapes alone, and in one chunk's forward only."""
    with FakeTensorMode() as mode:
        query = mode.from_tensor(torch.empty(3, 4, LENGTH, 6))
    with SequenceAttention(Exchange(CHUNKS), CooperativeScheduler([])) as attention:
        found = F.scaled_dot_product_attention(query, query, query, is_causal=True)
    assert found.shape == query.shape
    with pytest.raises(UsageError, match="does not call"):
        attention.check()
