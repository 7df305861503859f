"""Logits in chunks have the cross entropy that they have joined, and nothing else is computed of them."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.errors import UsageError
from lockstep.parallel.tensor.chunks import Region
from lockstep.parallel.tensor.logits import ChunkedLogits

ENTRIES = 65  # chunks of 17, 16, 16 and 16


def in_chunks(whole: Tensor) -> ChunkedLogits:
    chunks = Region(4, "head")
    return ChunkedLogits(
        [whole[..., rows.start : rows.stop] for rows in chunks.get_row_ranges(ENTRIES)], chunks, ENTRIES
    )


def with_gradient(compute: Callable[[Tensor], Tensor], whole: Tensor, cut: bool) -> tuple[Tensor, Tensor]:
    whole = whole.clone().requires_grad_()
    loss = compute(in_chunks(whole) if cut else whole)
    [gradient] = torch.autograd.grad((loss * torch.arange(1, loss.numel() + 1).view(loss.shape)).sum(), whole)
    return loss, gradient


TARGETS = torch.randint(ENTRIES, (3, 7))
TARGETS[0] = torch.tensor([0, 16, 17, 64, -100, -100, 33])
TARGETS[1] = 3
LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda each: F.cross_entropy(each.reshape(-1, each.shape[-1]), TARGETS.reshape(-1), reduction="sum"),
    "mean": lambda each: nn.CrossEntropyLoss()(each.view(-1, each.size(-1)), TARGETS.view(-1)),
    "of each": lambda each: F.cross_entropy(each.flatten(0, 1), TARGETS.flatten(), reduction="none"),
    "another one ignored": lambda each: F.cross_entropy(
        each.view((-1, ENTRIES)), TARGETS.relu().flatten(), None, None, 17
    ),
    "shifted": lambda each: F.cross_entropy(
        each[..., :-1, :].contiguous().to(torch.float64).view(-1, ENTRIES), TARGETS[:, 1:].reshape(-1), reduction="sum"
    ),
    "of some samples": lambda each: F.cross_entropy(each[:2, :-1].flatten(0, 1), TARGETS[:2, 1:].flatten()),
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_cross_entropy_is_that_of_the_whole(name: str) -> None:
    whole = 30 * torch.randn(3, 7, ENTRIES, dtype=torch.float64)
    whole[1, :, 17:33] = -torch.inf  # all of a chunk, which no target is in
    for found, expected in zip(
        with_gradient(LOSSES[name], whole, cut=True), with_gradient(LOSSES[name], whole, cut=False), strict=True
    ):
        assert expected.isfinite().all()
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_16_bits_are_added_up_in_32() -> None:
    whole = (3 * torch.randn(3, 7, ENTRIES)).bfloat16()
    loss = LOSSES["sum"]
    found, of_found = with_gradient(lambda each: loss(each.float()), whole, cut=True)
    expected, of_expected = with_gradient(lambda each: loss(each.float()), whole, cut=False)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert of_found.dtype == torch.bfloat16
    torch.testing.assert_close(of_found, of_expected)


def test_its_shape_is_that_of_the_whole_and_its_gradient_that_of_its_parts() -> None:
    logits = in_chunks(torch.zeros(3, 7, ENTRIES))
    assert (logits.shape, logits.ndim, logits.dtype, logits.requires_grad) == ((3, 7, ENTRIES), 3, torch.float32, False)
    assert in_chunks(torch.zeros(3, ENTRIES, requires_grad=True)).requires_grad
    assert "chunks range(0, 4) of 4" in repr(logits)


@pytest.mark.parametrize(
    ("compute", "problem"),
    [
        (lambda each: 30 * torch.tanh(each / 30), "aten.div.Tensor computes with them"),
        (lambda each: each.argmax(-1), "aten.argmax.default computes with them"),
        (lambda each: each[..., :50], "they are indexed by [(Ellipsis, slice(None, 50, None))]"),
        (lambda each: each[0], "they are indexed by [0]"),
        (lambda each: each.reshape(-1), "they are reshaped from [3, 65] to [195]"),
        (lambda each: each.to("meta"), "to(meta) is called on them"),
        (
            lambda each: F.cross_entropy(each, torch.zeros(3).long(), label_smoothing=0.1),
            "the cross entropy sets label_smoothing",
        ),
        (lambda each: F.cross_entropy(each, torch.zeros(3).long(), torch.ones(ENTRIES)), "entropy sets weight"),
        (
            lambda each: F.cross_entropy(each, torch.zeros(3, ENTRIES)),
            "have targets of torch.float32 and shape [3, 65]",
        ),
    ],
)
def test_anything_else_is_refused(compute: Callable[[Tensor], Any], problem: str) -> None:
    with pytest.raises(UsageError, match=re.escape(problem) + ".*, or set head to whole"):
        compute(in_chunks(torch.zeros(3, ENTRIES)))


def test_a_target_that_is_no_entry_ends_it() -> None:
    with pytest.raises(RuntimeError, match=r"a target is not in \[0, 65\)"):
        F.cross_entropy(in_chunks(torch.zeros(1, ENTRIES)), torch.tensor([65]))
