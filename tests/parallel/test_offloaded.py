"""Steps in pieces, over what waits elsewhere: as one step over all of it, whatever an optimizer counts, and where."""

from collections.abc import Iterable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from lockstep.parallel import offloaded
from lockstep.parallel.offloaded import OffloadedOptimizer, group_by_size, on_device_copies
from lockstep.parallel.optimize import make_optimizer

CPU = torch.device("cpu")
NAMES = ("sgd", "adamw", "lamb", "adan", "nadam", "adafactor")


class Counting(Optimizer):
    """Counts its steps in its groups: from the first one on, in one that is not there before, and in a tensor."""

    def __init__(self, params: Iterable[Any], lr: float) -> None:
        super().__init__(params, {"lr": lr, "steps": 0})
        for group in self.param_groups:
            group["share"] = torch.ones(())

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] += 1
            group["seen"] = group.get("seen", 0) + 1
            group["share"] /= 2
            for parameter in group["params"]:
                if parameter.grad is not None:
                    factor = group["lr"] * float(group["share"]) * group["steps"] * group["seen"]
                    parameter.data.sub_(parameter.grad, alpha=factor)


def trained() -> list[tuple[str, nn.Parameter]]:
    torch.manual_seed(0)
    return [(f"{number}", nn.Parameter(torch.randn(5, 3))) for number in range(7)]


def counting(parameters: list[tuple[str, nn.Parameter]]) -> Optimizer:
    tensors = [parameter for _, parameter in parameters]
    return Counting([{"params": tensors[:4]}, {"params": tensors[4:], "lr": 0.3}], lr=0.1)


def named(name: str) -> Any:
    return lambda parameters: make_optimizer(parameters, name=name, lr=0.1)


@pytest.mark.parametrize("make", [counting, *map(named, NAMES)], ids=["counting", *NAMES])
def test_pieces_make_one_step(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloaded, "_PIECE_BYTES", 150)  # of two parameters, and the last alone
    ended = []
    for in_pieces in (False, True):
        parameters = trained()
        optimizer = make(parameters)
        by = OffloadedOptimizer(optimizer, {each: each.nbytes for _, each in parameters}, CPU)
        pieces_seen = mock.Mock(side_effect=optimizer.step)
        for number in range(4):
            for index, (_, parameter) in enumerate(parameters):
                parameter.grad = torch.full_like(parameter, number + index) if index != 2 else None
            by.step(pieces_seen) if in_pieces else optimizer.step()
        ended.append([[each for _, each in parameters], optimizer.state_dict()])
    assert pieces_seen.call_count >= 4 * 4
    whole, cut = tree_map_only(Tensor, lambda each: (each.dtype, each.tolist()), ended)
    assert cut == whole


def test_what_is_lent_comes_back() -> None:
    own = torch.ones(2)
    with on_device_copies([own, own], CPU) as there:
        assert there[0] is own
    with mock.patch.object(Tensor, "copy_") as copied, on_device_copies([own], torch.device("meta")) as [moved]:
        assert moved.is_meta
    copied.assert_called_once_with(moved)


def test_pieces_are_of_neighbors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloaded, "_PIECE_BYTES", 4)
    assert [*group_by_size([("a", 2), ("b", 2), ("c", 1), ("d", 9), ("e", 1)])] == [["a", "b"], ["c"], ["d"], ["e"]]
    assert [*group_by_size([])] == []
