"""A plan that can be followed and computes something else is found, and named by its region."""

import copy

import pytest
import torch
from torch import nn

from lockstep.models.gpt import gpt
from lockstep.parallel.tensor.built_in import known_plan
from lockstep.parallel.tensor.plan import cut_into_chunks
from lockstep.verification.plan_check import departure

IDS = torch.randint(20, (2, 8))


def _gpt(plan: dict[str, str]) -> tuple[nn.Module, nn.Module]:
    whole = gpt(vocabulary=20, context=8, layers=2, heads=2, width=16).eval()
    for parameter in whole.parameters():
        nn.init.normal_(parameter, std=0.3)
    in_chunks = copy.deepcopy(whole)
    cut_into_chunks(in_chunks, plan | known_plan(whole) | plan, 2)
    return whole, in_chunks


@pytest.mark.parametrize("plan", [{}, {"*.tokens": "vocab", "head": "vocab"}])
def test_what_is_right_agrees(plan: dict[str, str]) -> None:
    assert departure(*_gpt(plan), (IDS,)) is None


def test_heads_that_were_forgotten_are_found_where_they_are() -> None:
    found = departure(*_gpt({"blocks.1.attention": "whole"}), (IDS,))
    assert found is not None
    assert found[0] == "blocks.1.attention"
    assert found[1] > 1e-3


class OnlySingle(nn.Module):
    """Knows no float64, as some kernels do not."""

    def __init__(self, normed: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.normed = normed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.float64:
            raise RuntimeError("not in float64")
        x = self.up(x)
        down: torch.Tensor = self.down(x / x.norm(dim=-1, keepdim=True) if self.normed else x.relu())
        return down


@pytest.mark.parametrize("normed", [False, True])
def test_what_float64_cannot_be_tried_in_is_tried_in_float32(normed: bool) -> None:
    whole = OnlySingle(normed)
    in_chunks = copy.deepcopy(whole)
    cut_into_chunks(in_chunks, {"up": "colwise", "down": "rowwise"}, 2)
    found = departure(whole, in_chunks, (torch.randn(5, 6),))
    assert (found is not None) == normed
