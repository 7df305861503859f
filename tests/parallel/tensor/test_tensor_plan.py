"""A plan is checked before anything is cut, and every mistake is named with what would do."""

import copy
import re
from collections.abc import Callable
from functools import partial

import cut_models
import pytest
import torch
from torch import nn

from lockstep.errors import UsageError
from lockstep.parallel.tensor.plan import find_region_names, split_into_chunks

MLP = {"up": "colwise", "down": "rowwise"}
WHOLE = {**MLP, "norm": "whole"}


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = 6
        self.norm = nn.LayerNorm(5)
        self.up = nn.Linear(5, 12)
        self.act = nn.GELU()
        self.down = nn.Linear(12, 5)


class Headed(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.head_dim = 4


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pair = nn.ModuleDict(
            {"up": nn.Linear(4, 4), "norms": nn.Sequential(nn.LayerNorm(2)), "down": nn.Linear(4, 4)}
        )


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.ModuleDict({"up": nn.Linear(4, 4), "down": nn.Linear(4, 4)})
        self.other = nn.ModuleDict({"up": nn.Linear(4, 4), "down": nn.Conv2d(4, 4, 1)})


def with_more(name: str, more: nn.Module | nn.Parameter) -> nn.Module:
    mixture = cut_models.Mixture()
    setattr(mixture.experts, name, more)
    return mixture


@pytest.mark.parametrize(
    ("model", "plan", "count", "problem"),
    [
        (Mlp, {"up": "columnwise"}, 2, "up: unknown kind 'columnwise'; did you mean 'colwise'?"),
        (Mlp, {"upp": "colwise"}, 2, "'upp' matches no module; did you mean 'up'?"),
        (
            Mlp,
            MLP,
            2,
            "the model is split, but the plan does not cover its parameter norm.weight; set the module of norm.weight",
        ),
        (Mlp, WHOLE, 5, "chunks: 5 does not divide the 12 outputs of up; use 2, 3, 4, 6, 12"),
        (Mlp, {**WHOLE, "up": "colwise:3"}, 8, "8 does not divide the 3 x 4 outputs of up; use 2, 4"),
        (Mlp, {**WHOLE, "down": "colwise", "up": "rowwise"}, 2, "2 does not divide the 5 outputs of down; use 5"),
        (Mlp, {"up": "colwise"}, 2, "up is set to colwise, but its module has no rowwise layer"),
        (Mlp, {"norm": "shared"}, 2, "norm is set to shared, but its module has no rowwise layer"),
        (
            Mlp,
            {"down": "rowwise"},
            2,
            "down is set to rowwise, but no module contains both it and a colwise layer",
        ),
        (Mlp, {**WHOLE, "act": "heads:heads"}, 2, "act has no integer attribute 'heads'"),
        (Headed, WHOLE, 2, "2 does not divide the 3 heads of up; use 3"),
        (Two, {"*.up": "colwise", "*.down": "rowwise"}, 2, "other.down is a Conv2d, but rowwise requires an nn.Linear"),
        (
            Two,
            {"one.down": "rowwise", "other.down": "rowwise", "other.up": "colwise", "one.up": "whole"},
            2,
            "the model has several rowwise layers; move each one, with the colwise layers before it, to",
        ),
    ],
)
def test_mistakes_are_named(model: type[nn.Module], plan: dict[str, str], count: int, problem: str) -> None:
    with pytest.raises(UsageError, match=re.escape(problem)):
        split_into_chunks(model(), plan, count)


def test_heads_that_are_not_divided_are_named() -> None:
    with pytest.raises(UsageError, match=r"3 does not divide blocks.0.attention.heads = 4; use 2, 4"):
        split_into_chunks(cut_models.made(), dict(cut_models.PLAN), 3)


@pytest.mark.parametrize(
    ("model", "count", "problem"),
    [
        (cut_models.Mixture, 3, "3 does not divide experts.count = 8; use 2, 4, 8"),
        (
            Mlp,
            2,
            "up is set to experts, but its forward does not take exactly three arguments; let it take rows [n, d]",
        ),
        (
            partial(with_more, "bias", nn.Parameter(torch.zeros(3))),
            2,
            "its parameter bias has shape [3]; use one row of dim 0",
        ),
        (
            partial(with_more, "norm", nn.LayerNorm(3)),
            2,
            "experts is set to experts, but has submodules with parameters",
        ),
    ],
)
def test_what_are_no_experts_is_refused(model: Callable[[], nn.Module], count: int, problem: str) -> None:
    with pytest.raises(UsageError, match=re.escape(problem)):
        split_into_chunks(model(), {"up" if model is Mlp else "experts": "experts:count"}, count)


def test_a_layer_that_shares_its_weight_is_not_cut() -> None:
    model = cut_models.made()
    model.blocks[0].up.weight = model.blocks[1].up.weight
    with pytest.raises(UsageError, match=r"blocks.0.up shares a weight with blocks.1.up"):
        split_into_chunks(model, dict(cut_models.PLAN), 2)


class Scorer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.conv = nn.Conv1d(4, 6, 1)
        self.head.weight = self.table.weight


def test_two_that_are_tied_are_cut_by_rows_together() -> None:
    model = Scorer()
    assert split_into_chunks(model, {"table": "vocab", "head": "vocab"}, 4) == {}
    assert model.head.weight is model.table.weight
    assert find_region_names(model) == {"table", "head"}


@pytest.mark.parametrize(
    ("plan", "count", "problem"),
    [
        ({"table": "vocab"}, 2, "table is set to vocab, but shares a weight with head; set both to vocab, or untie"),
        ({"*": "vocab"}, 7, "chunks: table has 6 rows, fewer than 7 chunks; use fewer chunks, or set table to whole"),
        ({"conv": "vocab"}, 2, "conv is a Conv1d, but vocab requires an nn.Embedding, or an nn.Linear whose outputs"),
    ],
)
def test_what_cannot_be_cut_by_rows_is_refused(plan: dict[str, str], count: int, problem: str) -> None:
    with pytest.raises(UsageError, match=re.escape(problem)):
        split_into_chunks(Scorer(), plan, count)


def test_a_gradient_by_the_number_of_looks_is_refused() -> None:
    model = Scorer()
    model.table.scale_grad_by_freq = True
    with pytest.raises(UsageError, match="table is set to vocab, but uses scale_grad_by_freq, which requires"):
        split_into_chunks(model, {"*": "vocab"}, 2)


def test_a_module_of_two_names_is_cut_under_both() -> None:
    model = cut_models.made()
    model.blocks[1] = model.blocks[0]
    chunked = split_into_chunks(model, dict(cut_models.PLAN), 2)
    assert chunked["blocks.1.attention.out.weight"] == chunked["blocks.0.attention.out.weight"]


def test_the_first_pattern_that_fits_counts() -> None:
    model = cut_models.made()
    chunked = split_into_chunks(
        model, {"blocks.0.*": "whole", "blocks.0": "whole", "tail.*": "whole"} | dict(cut_models.PLAN), 2
    )
    assert {name.split(".")[1] for name in chunked} == {"1"}
    assert find_region_names(model) == {"blocks.1", "blocks.1.attention", "mixture.experts"}


def test_weights_are_those_of_the_model_rearranged() -> None:
    uncut, cut = cut_models.made(), cut_models.made()
    chunked = split_into_chunks(cut, dict(cut_models.PLAN), 4)
    whole = dict(uncut.named_parameters())
    for name, parameter in cut.named_parameters():
        back = chunked[name].from_rows(parameter) if name in chunked else parameter
        assert torch.equal(back, whole[name]), name
    assert "blocks.0.attention.out.bias" not in chunked  # it is added once


def test_a_copy_of_a_model_in_chunks_is_one_of_its_own() -> None:
    model = cut_models.made().eval()
    split_into_chunks(model, dict(cut_models.PLAN), 2)
    twin = copy.deepcopy(model)
    images = torch.randn(2, 3, 5, 5)
    expected = model(images)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(twin(images), expected)
