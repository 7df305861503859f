"""Batches of any structure: their tensors, their places, and back again."""

from typing import Any

import torch
from torch import Tensor, nn

from lockstep.core import batch

NESTED: dict[str, Any] = {"x": (torch.ones(3, 2), "name"), "y": [torch.zeros(3)]}


def test_tensors_come_out_in_order_and_go_back() -> None:
    first, second = batch.tensors_of(NESTED)
    assert (first.shape, second.shape) == ((3, 2), (3,))
    assert batch.length(NESTED) == 3
    back = batch.like(NESTED, [torch.full((1,), 5.0), torch.full((1,), 6.0)])
    assert (back["x"][0].item(), back["x"][1], back["y"][0].item()) == (5.0, "name", 6.0)


def test_a_change_is_made_to_tensors_alone() -> None:
    changed = batch.map_tensors(lambda tensor: tensor.sum().item(), NESTED)
    assert changed == {"x": (6.0, "name"), "y": [0.0]}


def test_each_leaf_has_a_place() -> None:
    assert [path for path, _ in batch.with_paths(NESTED)] == ["['x'][0]", "['x'][1]", "['y'][0]"]
    assert batch.with_paths(5) == [("", 5)]
    assert batch.map_with_paths(lambda path, _: path, NESTED)["y"] == ["['y'][0]"]


class Difference(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a - b


def test_a_model_takes_inputs_by_position_or_by_name() -> None:
    one, two = torch.ones(()), torch.full((), 2.0)
    assert batch.call(Difference(), (one, two)).item() == -1.0
    assert batch.call(Difference(), {"b": one, "a": two}).item() == 1.0
