"""Gradients go out in buckets, in one order, as soon as they are made; what comes back is their tree's sum."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint

from lockstep.comm.canonical import CanonicalSum
from lockstep.core.mesh import DataRank
from lockstep.errors import UsageError
from lockstep.parallel.gradients import (
    BucketedGradientSum,
    flatten_gradients,
    get_wide_gradient,
    partition_into_buckets,
    unflatten_gradients,
)
from lockstep.tasks.base import MicroBatch

T = TypeVar("T")


class Noted:
    """A stream that does things at once and counts them."""

    def __init__(self) -> None:
        self.count = 0

    def submit(self, function: Callable[[], T]) -> Callable[[], T]:
        self.count += 1
        result = function()
        return lambda: result

    def close(self) -> None: ...


def _gradients(
    parameters: Sequence[Parameter], stream: Noted, alone: bool, bucket_bytes: int = 1
) -> BucketedGradientSum:
    trained = [(f"parameter {number}", parameter) for number, parameter in enumerate(parameters)]
    return BucketedGradientSum(trained, CanonicalSum(0, [DataRank()], None), stream, alone, bucket_bytes)


def microbatches(count: int) -> list[MicroBatch]:
    return [MicroBatch(index, torch.empty(1), 1, 1) for index in range(count)]


def _sizes(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Parameter]:
    return [Parameter(torch.ones(shape, dtype=dtype)) for shape in shapes]


def test_buckets_run_from_the_last_parameter_to_the_first() -> None:
    a, b, c, d = _sizes((10,), (2,), (3,), (4,))  # 40, 8, 12 and 16 bytes
    assert partition_into_buckets([a, b, c, d], 28) == [[d, c], [b], [a]]
    assert partition_into_buckets([a, b, c, d], 1) == [[d], [c], [b], [a]]
    assert partition_into_buckets([a, b, c, d], None) == [[d, c, b, a]]


def test_a_bucket_has_one_dtype() -> None:
    [single], [double] = _sizes((2,)), _sizes((2,), dtype=torch.float64)
    assert [[each.dtype for each in bucket] for bucket in partition_into_buckets([single, double, double], None)] == [
        [torch.float64, torch.float64],
        [torch.float32],
    ]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(1, 200))
def test_every_parameter_is_in_one_bucket_and_none_is_too_large(lengths: list[int], limit: int) -> None:
    parameters = _sizes(*((length,) for length in lengths))
    buckets = partition_into_buckets(parameters, limit)
    assert [id(each) for bucket in buckets for each in bucket] == [id(each) for each in reversed(parameters)]
    assert all(len(bucket) == 1 or sum(each.nbytes for each in bucket) <= limit for bucket in buckets)


@pytest.mark.parametrize(
    "parameter",
    [
        torch.randn(4, 3, 3, 3).contiguous(memory_format=torch.channels_last),
        torch.randn(4, 1, 1, 1).contiguous(memory_format=torch.channels_last),
        torch.randn(5, 7).t(),
        torch.randn(2, 3, 4).permute(2, 0, 1),
        torch.randn(()),
        torch.randn(1),
        torch.randn(0, 3),
    ],
    ids=lambda each: f"{tuple(each.shape)} {each.stride()}",
)
def test_flat_and_back_keeps_values_and_memory_format(parameter: Tensor) -> None:
    parameters = [Parameter(parameter), Parameter(torch.zeros(2))]
    parts = [torch.randn(each.shape) for each in parameters]  # contiguous, as a user's function may give them
    back = unflatten_gradients(flatten_gradients(parts, parameters), parameters)
    for part, returned, each in zip(parts, back, parameters, strict=True):
        assert torch.equal(returned, part)
        moved = [(size, stride) for size, stride in zip(each.shape, each.stride(), strict=True) if size > 1]
        assert moved == [(s, t) for s, t in zip(returned.shape, returned.stride(), strict=True) if s > 1]


def test_a_gradient_that_lies_as_its_parameter_is_not_moved() -> None:
    parameter = Parameter(torch.randn(4, 3, 3, 3).contiguous(memory_format=torch.channels_last))
    gradient = torch.randn_like(parameter)
    flat = flatten_gradients([gradient], [parameter])
    assert torch.equal(flat[: gradient.numel()], gradient.permute(0, 2, 3, 1).flatten())
    assert not flat[gradient.numel() :].any()


def test_in_a_bucket_each_parameter_begins_where_memory_of_its_own_might() -> None:
    parameters = _sizes((10,), (3, 43), (), (0, 3), (256,))
    flat = flatten_gradients([torch.ones(each.shape) for each in parameters], parameters)
    places = [each.storage_offset() for each in unflatten_gradients(flat, parameters)]
    assert places == [0, 128, 384, 512, 512]


@pytest.mark.parametrize("alone", [True, False])
def test_the_sum_of_all_micro_batches_is_left(alone: bool) -> None:
    used, unused = Parameter(torch.tensor([2.0])), Parameter(torch.tensor([5.0]))
    gradients = _gradients([used, unused], Noted(), alone)
    for _ in range(2):
        gradients.begin(3, microbatches(3))
        for leaf, factor in enumerate((1.0, 10.0, 100.0)):
            gradients.before_backward(microbatches(3)[leaf])
            (used * factor).sum().backward()
            gradients.after_backward(microbatches(3)[leaf])
        gradients.finish()
        assert (used.grad.item(), unused.grad.item()) == (111.0, 0.0)
        used.grad = unused.grad = None


def test_buckets_leave_while_the_last_backward_runs_and_not_before() -> None:
    layers = [nn.Linear(4, 4) for _ in range(3)]
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    stream = Noted()
    gradients = _gradients(parameters, stream, alone=False)
    counts: list[int] = []
    layers[0].weight.register_hook(lambda _: counts.append(stream.count))
    gradients.begin(2, microbatches(2))
    for leaf in range(2):
        gradients.before_backward(microbatches(3)[leaf])
        nn.Sequential(*layers)(torch.ones(1, 4)).sum().backward()
        gradients.after_backward(microbatches(3)[leaf])
    assert counts == [0, 5]  # all but the one whose gradient is only now there
    gradients.finish()
    assert stream.count == 6


def test_an_unused_parameter_holds_back_only_what_comes_after_it() -> None:
    """All ranks send in one order, and only some may have used it."""
    first, unused, last = _sizes((1,), (1,), (1,))
    stream = Noted()
    gradients = _gradients([first, unused, last], stream, alone=False)
    for sent, finished in ((0, 3), (4, 6)):  # the first backward is waited for
        gradients.begin(1, microbatches(1))
        gradients.before_backward(microbatches(1)[0])
        (first + last).sum().backward()
        gradients.after_backward(microbatches(1)[0])
        assert stream.count == sent
        gradients.finish()
        assert stream.count == finished


def test_a_shared_parameter_is_ready_once_both_uses_are_added() -> None:
    shared = Parameter(torch.tensor([3.0]))
    gradients = _gradients([shared], Noted(), alone=False)
    gradients.begin(1, microbatches(1))
    gradients.before_backward(microbatches(1)[0])
    (shared * 2 + (shared * 5).sin()).sum().backward()
    gradients.after_backward(microbatches(1)[0])
    gradients.finish()
    assert shared.grad.item() == pytest.approx(2 + 5 * torch.tensor(15.0).cos().item())


class Reentrant(nn.Module):
    """A layer that is called in several reentrant checkpoints, each with a backward of its own, before a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, calls: int) -> Tensor:
        x = x.requires_grad_()
        for _ in range(calls):
            x = x + checkpoint(self.layer, x, use_reentrant=True)
        return self.head(x)


def _reentrant_steps(alone: bool, steps: Sequence[Sequence[int]], head: bool = True) -> list[Tensor]:
    """Return the gradients after steps whose micro-batches call the layer so often."""
    torch.manual_seed(0)
    model = Reentrant()
    model.head.requires_grad_(head)
    trained = [each for each in model.parameters() if each.requires_grad]
    gradients = _gradients(trained, Noted(), alone)
    sums = []
    for calls in steps:
        of_step = microbatches(len(calls))
        gradients.begin(len(calls), of_step)
        for microbatch, count in zip(of_step, calls, strict=True):
            gradients.before_backward(microbatch)
            model(torch.randn(3, 4), count).sum().backward()
            gradients.after_backward(microbatch)
        gradients.finish()
        sums += [each.grad.clone() for each in trained]
        model.zero_grad()
    return sums


@pytest.mark.parametrize(
    ("steps", "head"),
    [([[2], [2]], True), ([[2], [2]], False), ([[1, 3], [3]], True), ([[3, 1], [3]], False), ([[1], [2]], True)],
    ids=str,
)
def test_a_gradient_that_a_nested_backward_adds_to_again_is_sent_when_complete(
    steps: Sequence[Sequence[int]], head: bool
) -> None:
    several, one = (_reentrant_steps(alone, steps, head) for alone in (False, True))
    assert all(map(torch.equal, several, one))


def test_a_gradient_that_a_later_step_adds_to_after_it_was_sent_is_refused() -> None:
    with pytest.raises(UsageError, match=r"gradient of parameter \d after it was sent.*; pass use_reentrant=False"):
        _reentrant_steps(alone=False, steps=[[1], [2]], head=False)


def test_what_a_copy_in_16_bits_gets_is_added_in_float32() -> None:
    copy, own = (Parameter(torch.ones(3, dtype=torch.bfloat16)) for _ in range(2))
    copy.grad_dtype = None  # see weights.py
    for parameter in (copy, own):
        parameter.grad = torch.ones(3, dtype=torch.bfloat16)
    assert get_wide_gradient(copy).dtype == torch.float32
    assert get_wide_gradient(own) is own.grad
