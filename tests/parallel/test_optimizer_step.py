"""Parameter groups keep the ratio of their own rate to the optimizer's while that follows the schedule."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from lockstep.core.engine_recipe import PlainLossScale, PlainRecipe
from lockstep.parallel.layerwise import ComputeNorms
from lockstep.parallel.numerics import Numerics
from lockstep.parallel.optimizer_state import NamedParameter, get_optimizer_state, load_optimizer_state
from lockstep.parallel.optimizer_step import WeightUpdater
from lockstep.parallel.weights import ReplicatedLayout


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))


def with_rates_of_their_own(trained: Sequence[NamedParameter], norms: ComputeNorms) -> Optimizer:
    return SGD([{"params": [p], "lr": 0.4 if name.startswith("0") else 0.1} for name, p in trained], lr=0.1)


def with_timms_scales(trained: Sequence[NamedParameter], norms: ComputeNorms) -> Optimizer:
    """As timm.optim.param_groups_layer_decay makes groups, for timm's schedules to apply."""
    return SGD([{"params": [p], "lr_scale": 0.5 if name.startswith("0") else 1.0} for name, p in trained], lr=0.1)


def updates(make: Any) -> tuple[WeightUpdater, ReplicatedLayout]:
    layout = ReplicatedLayout(model(), None)
    return WeightUpdater(layout, make, Numerics(PlainRecipe(1)), torch.device("cpu")), layout


def moved(by: WeightUpdater, layout: ReplicatedLayout, lr: float) -> dict[str, float]:
    """Return how far a gradient of ones moves each parameter, which for plain SGD is its rate."""
    before = {name: parameter.detach().clone() for name, parameter in layout.trained}
    for _, parameter in layout.trained:
        parameter.grad = torch.ones_like(parameter)
    by.update(lr, None, torch.zeros(()), 1)
    return {name: float((before[name] - p.detach()).mean()) for name, p in layout.trained}


def test_rates_of_groups_follow_the_schedule() -> None:
    by, layout = updates(with_rates_of_their_own)
    for lr in (0.1, 0.2, 0.05):
        for name, distance in moved(by, layout, lr).items():
            assert distance == pytest.approx(4 * lr if name.startswith("0") else lr, rel=1e-5)


def test_timms_scales_of_groups_are_applied() -> None:
    by, layout = updates(with_timms_scales)
    for name, distance in moved(by, layout, 0.2).items():
        assert distance == pytest.approx(0.1 if name.startswith("0") else 0.2, rel=1e-5)


def state_of(by: WeightUpdater, layout: ReplicatedLayout) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
    return get_optimizer_state(layout.trained, by.optimizer)


def test_ratios_are_in_the_state_and_older_states_without_them_load() -> None:
    first, layout = updates(with_rates_of_their_own)
    moved(first, layout, 0.2)
    tensors, scalars = state_of(first, layout)
    assert [group.get("lr_scale") for group in scalars["groups"]] == [4.0, 4.0, None, None]
    for groups in (scalars["groups"], [{**group, "lr_scale": None} for group in scalars["groups"]]):
        older = [{key: value for key, value in group.items() if value is not None} for group in groups]
        second, other = updates(with_rates_of_their_own)
        load_optimizer_state(other.trained, second.optimizer, tensors, {**scalars, "groups": older})
        assert moved(second, other, 0.1)["0.weight"] == pytest.approx(0.4, rel=1e-5)


def test_one_rate_for_all_is_that_rate_and_leaves_the_state_as_it_was() -> None:
    by, layout = updates(lambda trained, norms: SGD([p for _, p in trained], lr=0.3))
    moved(by, layout, 0.1)
    assert by.optimizer.param_groups[0]["lr"] == 0.1
    assert "lr_scale" not in state_of(by, layout)[1]["groups"][0]


def test_a_gradient_that_overflowed_moves_nothing_and_halves_the_scale() -> None:
    layout = ReplicatedLayout(model(), None)
    numerics = Numerics(PlainRecipe(1, precision="fp16", loss_scale=PlainLossScale(initial=1024.0)))
    by = WeightUpdater(layout, with_rates_of_their_own, numerics, torch.device("cpu"))
    before = {name: parameter.detach().clone() for name, parameter in layout.trained}
    for number, (_, parameter) in enumerate(layout.trained):
        parameter.grad = torch.full_like(parameter, torch.inf if number == 1 else 1.0)
    update = by.update(0.1, None, torch.zeros(()), 1)
    assert (update.applied, update.loss_scale, by.loss_scale["scale"]) == (False, 1024.0, 512.0)
    assert all(torch.equal(parameter, before[name]) for name, parameter in layout.trained)
