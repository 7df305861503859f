"""A loss that is no sum is refused, wherever in its graph the mean stands."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lockstep.errors import UsageError
from lockstep.run.own_loss import check_loss

TARGETS = torch.zeros(4, dtype=torch.int64)


def logits() -> Tensor:
    outputs: Tensor = nn.Linear(3, 2)(torch.ones(4, 3))
    return outputs


@pytest.mark.parametrize(
    "loss",
    [
        lambda x: functional.cross_entropy(x, TARGETS, reduction="sum"),
        lambda x: x.square().sum(),
        lambda x: functional.cross_entropy(x, TARGETS, reduction="sum") + x.abs().mean(),
    ],
)
def test_a_sum_is_taken(loss: Callable[[Tensor], Tensor]) -> None:
    check_loss(1, loss(logits()))


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda x: functional.cross_entropy(x, TARGETS), "the loss is a mean"),
        (lambda x: x.square().mean(), "the loss is a mean"),
        (lambda x: x.square().mean().view(1).squeeze().double(), "the loss is a mean"),
        (lambda x: x.sum().detach(), "the loss has no graph that leads to the model"),
        (lambda x: x.sum(0), r"step.backward was given a tensor of shape \[2\]"),
        (lambda x: x.sum().item(), "step.backward was given a float"),
    ],
)
def test_what_is_no_sum_is_refused(loss: Callable[[Tensor], Tensor], said: str) -> None:
    with pytest.raises(UsageError, match=f"step 1: {said}"):
        check_loss(1, loss(logits()))
