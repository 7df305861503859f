"""Batches of any structure: their tensors, their places, and back again."""

from collections import UserDict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.core import batch

NESTED: dict[str, Any] = {"x": (torch.ones(3, 2), "name"), "y": [torch.zeros(3)]}


def test_tensors_come_out_in_order_and_go_back() -> None:
    first, second = batch.get_tensors(NESTED)
    assert (first.shape, second.shape) == ((3, 2), (3,))
    assert batch.get_batch_size(NESTED) == 3
    back = batch.replace_tensors(NESTED, [torch.full((1,), 5.0), torch.full((1,), 6.0)])
    assert (back["x"][0].item(), back["x"][1], back["y"][0].item()) == (5.0, "name", 6.0)


def test_a_change_is_made_to_tensors_alone() -> None:
    changed = batch.map_tensors(lambda tensor: tensor.sum().item(), NESTED)
    assert changed == {"x": (6.0, "name"), "y": [0.0]}


def test_each_leaf_has_a_place() -> None:
    assert [path for path, _ in batch.leaves_with_paths(NESTED)] == ["['x'][0]", "['x'][1]", "['y'][0]"]
    assert batch.leaves_with_paths(5) == [("", 5)]
    assert batch.map_with_paths(lambda path, _: path, NESTED)["y"] == ["['y'][0]"]


class Difference(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a - b


def test_a_model_takes_inputs_by_position_or_by_name() -> None:
    one, two = torch.ones(()), torch.full((), 2.0)
    assert batch.call_model(Difference(), (one, two)).item() == -1.0
    assert batch.call_model(Difference(), {"b": one, "a": two}).item() == 1.0


@dataclass(frozen=True)
class Pair:
    """A batch as a class of the user's own."""

    x: Tensor
    rest: Any


@pytest.mark.parametrize(
    "made",
    [
        lambda: Pair(torch.ones(3, 2), {"y": torch.zeros(3), "name": "a"}),
        lambda: SimpleNamespace(x=torch.ones(3, 2), rest=(torch.zeros(3), "a")),
        lambda: UserDict(x=torch.ones(3, 2), y=torch.zeros(3)),
    ],
)
def test_an_object_is_a_batch_by_its_attributes(made: Any) -> None:
    nested = [made(), 5]
    assert [each.shape for each in batch.get_tensors(nested)] == [(3, 2), (3,)]
    changed, five = batch.map_tensors(lambda tensor: tensor + 1, nested)
    assert (type(changed), five) == (type(nested[0]), 5)
    assert [each.unique().item() for each in batch.get_tensors(changed)] == [2, 1]
    assert [each.unique().item() for each in batch.get_tensors(nested)] == [1, 0]  # which is left alone
    assert [path.startswith("[0]") for path, _ in batch.leaves_with_paths(nested)][:2] == [True, True]
    paths = batch.map_with_paths(lambda path, leaf: path if isinstance(leaf, Tensor) else leaf, nested)
    assert [each for each, leaf in batch.leaves_with_paths(nested) if isinstance(leaf, Tensor)] == [
        leaf for _, leaf in batch.leaves_with_paths(paths) if isinstance(leaf, str) and leaf.startswith("[0]")
    ]
