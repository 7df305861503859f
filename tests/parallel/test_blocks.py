"""Blocks are what stands in plain containers; nothing that shares a parameter with the rest, and no part of a block."""

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn

from lockstep.parallel.blocks import find_blocks


def names(model: nn.Module) -> list[str]:
    by_module = {module: name for name, module in model.named_modules()}
    return [by_module[unit] for unit in find_blocks(model)]


def test_golden_blocks() -> None:
    assert names(torchvision.models.resnet18()) == [f"layer{n}.{k}" for n in (1, 2, 3, 4) for k in (0, 1)]
    assert names(timm.create_model("vit_tiny_patch16_224", depth=3)) == ["blocks.0", "blocks.1", "blocks.2"]
    found = names(timm.create_model("efficientnet_b0"))
    assert found[:2] == ["blocks.0.0", "blocks.1.0"]
    assert len(found) == 16


def test_a_users_containers_may_lie_in_each_other() -> None:
    inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    model = nn.Sequential(nn.Flatten(), inner, nn.ModuleList([nn.Linear(2, 2)]))
    assert names(model) == ["1.0", "1.2", "2.0"]


class Block(nn.Module):
    def __init__(self, shared: nn.Parameter | None = None) -> None:
        super().__init__()
        self.parts = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        self.scale = shared if shared is not None else nn.Parameter(torch.ones(2))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.parts(inputs) * self.scale


class Tied(nn.Module):
    """Its first and last blocks share a parameter, its third shares one with the head."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Parameter(torch.ones(2))
        first = Block()
        self.blocks = nn.ModuleList([first, Block(), Block(self.head), Block(first.scale)])


def test_blocks_that_share_a_parameter_are_none() -> None:
    assert names(Tied()) == ["blocks.1"]


class Shared(nn.Module):
    """Its first block has a second name, by which its parts are in a container of the model's."""

    def __init__(self, earlier: bool) -> None:
        super().__init__()
        block = Block()
        if earlier:
            self.again = block
        self.blocks = nn.ModuleList([block, Block()])
        if not earlier:
            self.again = block
        self.others = nn.ModuleList([self.blocks[1]])


@pytest.mark.parametrize(("earlier", "first"), [(False, "blocks.0"), (True, "again")])
def test_blocks_with_a_second_name_are_blocks_once_and_as_a_whole(earlier: bool, first: str) -> None:
    assert sorted(names(Shared(earlier))) == sorted([first, "blocks.1"])


def test_a_model_without_containers_has_no_blocks() -> None:
    assert names(nn.Linear(2, 2)) == []
