"""Tables and heads whose rows are cut compute what they do whole, and have the same bits on any number of ranks."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import worlds
from pairs import pairs
from same_bits import assert_resumed_bits, assert_same_bits
from test_slices import sizes_of
from torch import Tensor, nn
from torch.nn import functional as F
from toys import Case

from lockstep.models.gpt import gpt
from lockstep.parallel.tensor.built_in import get_built_in_plan
from lockstep.parallel.tensor.plan import split_into_chunks

PLAN = {"*.tokens": "vocab", "head": "vocab"}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("entries", [64, 65, 67])
def test_our_gpt_learns_what_it_learns_whole(tied: bool, entries: int) -> None:
    whole = gpt(vocabulary=entries, context=9, layers=1, heads=4, width=24, tied=tied).double()
    cut = copy.deepcopy(whole)
    chunked = split_into_chunks(cut, PLAN | get_built_in_plan(cut), 4)
    ids = torch.randint(entries, (3, 10))
    for model in (whole, cut):
        F.cross_entropy(model(ids[:, :-1]).view(-1, entries), ids[:, 1:].reshape(-1), reduction="sum").backward()
    found = {name: each.grad for name, each in cut.named_parameters()}
    for name, parameter in whole.named_parameters():
        gradient = chunked[name].from_rows(found[name]) if name in chunked else found[name]
        assert (gradient - parameter.grad).abs().max() < 1e-10 * parameter.grad.abs().max(), name


def test_evaluation_has_all_logits() -> None:
    whole = nn.Sequential(nn.Linear(3, 5)).double().eval()
    cut = copy.deepcopy(whole)
    split_into_chunks(cut, {"0": "vocab"}, 4)
    inputs = torch.randn(2, 7, 3, dtype=torch.float64)
    given = [model(inputs) for model in (whole, cut)]
    torch.testing.assert_close(given[1], given[0])
    for each in given:
        each.tanh().sum().backward()
    torch.testing.assert_close(cut[0].weight.grad, whole[0].weight.grad)


def test_padding_is_not_learned() -> None:
    whole = nn.Sequential(nn.Embedding(7, 3, padding_idx=5))
    cut = copy.deepcopy(whole)
    split_into_chunks(cut, {"0": "vocab"}, 3)
    ids = torch.tensor([[0, 5, 5], [2, 6, 2]])
    for model in (whole, cut):
        (model(ids) ** 2).sum().backward()
    assert torch.equal(cut(ids), whole(ids))
    assert torch.equal(cut[0].weight.grad, whole[0].weight.grad)


def test_an_id_that_is_no_row_ends_it() -> None:
    table = nn.Sequential(nn.Embedding(7, 3))
    split_into_chunks(table, {"0": "vocab"}, 3)
    with pytest.raises(RuntimeError, match=r"an id is not in \[0, 7\)"):
        table(torch.tensor([7]))


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 8), nn.Linear(8, 12)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.dropout(self.up(x).relu(), 0.2, self.training))


class Untied(nn.Module):
    """Pixels are ids of six rows: of four ranks two have two of these, and two have one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 12)
        self.feed = Feed()
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, 6)

    def forward(self, images: Tensor) -> Tensor:
        x = self.feed(self.table((4 * images[:, 0, 0]).long().remainder(6)))
        return self.head(self.norm(x).mean(1))


class Tied(Untied):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(12, 6, bias=False)
        self.head.weight = self.table.weight


CUT = (("table", "vocab"), ("head", "vocab"), ("*.up", "colwise"), ("*.down", "rowwise"))
NET = Case(model=Tied, samples=(12, 7, 3), chunks=4, plan=CUT)
CASES = {
    "tied": replace(NET, optimizer="adamw", clip=0.1),
    "tied, bf16-compute": replace(NET, precision="bf16-compute", clip=0.5, ema=True),
    "untied": replace(NET, model=Untied, optimizer="lamb", clip=1.0, ema=True),
    "untied, fp16": replace(NET, model=Untied, precision="fp16", initial_scale=2.0**20),
}
PLACED = [
    ("tensor", 2, ()),
    ("tensor", 4, ()),
    ("mesh", 4, (("pipe", 2), ("tensor", 2))),
    ("mesh", 4, (("shard", 2), ("tensor", 2))),
    ("ddp", 2, ()),
    ("zero3", 2, ()),
    ("pipeline", 2, ()),
]


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
@pytest.mark.parametrize(("name", "placed"), pairs([*CASES], PLACED))
def test_the_bits_are_those_of_one_process(name: str, placed: tuple[str, int, Any]) -> None:
    assert_same_bits(CASES[name], placed)


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
@pytest.mark.parametrize("name", ["tied", "untied"])
def test_going_on_elsewhere_gives_the_same_bits(name: str) -> None:
    then = ("mesh", 4, (("pipe", 2), ("tensor", 2)))
    assert_resumed_bits(CASES[name], ("tensor", 4, ()), then, at=2)


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
def test_a_rank_has_the_rows_of_its_chunks_alone() -> None:
    for sizes, rows in zip(worlds.run(2, sizes_of, replace(NET, strategy="tensor")), (4, 2), strict=True):
        assert sizes["table.weight"] == sizes["head.weight"] == (rows * 12, 6 * 12)
