"""Optimizers that look at all parameters at once are found before a pipeline trains with them."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import worlds
from torch import Tensor
from torch.nn import Parameter

from lockstep.comm.world import World
from lockstep.core.shard import Shard
from lockstep.errors import UsageError
from lockstep.parallel.layerwise import ComputeNorms
from lockstep.parallel.layouts.base import OptimizerStateLayout, gather_full_tensors
from lockstep.parallel.optimize import make_optimizer
from lockstep.parallel.optimizer_state import NamedParameter, get_optimizer_state
from lockstep.parallel.pipeline.state import OptimizerNames, check_separable


def made(
    trained: Sequence[NamedParameter], norms: ComputeNorms, name: str, options: Mapping[str, Any]
) -> torch.optim.Optimizer:
    return make_optimizer(trained, name=name, lr=0.1, norms=norms, options=options)


@pytest.mark.parametrize("name", ["sgd", "adamw", "adagrad", "lamb", "lars", "nadamw", "rprop", "adan", "lambc"])
def test_optimizers_that_work_on_one_parameter_at_a_time_are_taken(name: str) -> None:
    options = {"max_grad_norm": None} if name == "lambc" else {}
    check_separable(partial(made, name=name, options=options), (0, 1, 2, 4), "pipeline")


@pytest.mark.parametrize("dims", [(1,), (2, 4)])
def test_an_optimizer_that_clips_is_refused(dims: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="with optimizer Lamb, the update of a parameter depends on other parameters"):
        check_separable(partial(made, name="lambc", options={}), dims, "pipeline")


class Averaging(torch.optim.SGD):
    """Moves every parameter by the mean of all gradients."""

    def step(self, closure: Any = None) -> None:
        parameters: list[Tensor] = self.param_groups[0]["params"]
        means = [parameter.grad.mean() for parameter in parameters if parameter.grad is not None]
        with torch.no_grad():
            for parameter in parameters:
                parameter -= 0.1 * torch.stack(means).mean()


def test_an_optimizer_that_averages_is_refused() -> None:
    with pytest.raises(UsageError, match="optimizer Averaging"):
        check_separable(lambda trained, norms: Averaging([tensor for _, tensor in trained]), (2,), "pipeline")


def parameters(names: str) -> list[NamedParameter]:
    """Matrices are decayed, vectors are not: two groups."""
    shapes = {"a": (3,), "b": (2, 3), "c": (2,), "d": (3, 2)}
    return [(name, Parameter(torch.arange(6.0)[: math.prod(shapes[name])].view(shapes[name]))) for name in names]


def grouped(trained: Sequence[NamedParameter]) -> torch.optim.Optimizer:
    options = {"max_grad_norm": None}
    return make_optimizer(trained, name="lambc", lr=0.1, weight_decay=0.1, decay_bias_and_norm=False, options=options)


def moved(trained: Sequence[NamedParameter], optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        for _, parameter in trained:
            parameter.grad = parameter.detach() + 1
        optimizer.step()  # type: ignore[call-arg]


def names_of_all() -> OptimizerNames:
    whole = parameters("abcd")
    return OptimizerNames(whole, grouped(whole))


def slots(trained: Sequence[NamedParameter]) -> OptimizerStateLayout:
    return OptimizerStateLayout(trained, lambda _, tensor: tensor)


def told(world: World, held: str) -> tuple[dict[str, Tensor], dict[str, Any], list[str]]:
    """Train what this rank holds and return the state of all, whole."""
    trained = parameters(held.split()[world.rank])
    optimizer = grouped(trained)
    moved(trained, optimizer, 2)
    tensors, scalars = names_of_all().state(world, slots(trained), optimizer, primary=True)
    shards = [
        name for name, held in tensors.items() if isinstance(held, Shard) and held.tensor.numel() and held.primary
    ]
    return gather_full_tensors(world, tensors), scalars, shards


def went_on(world: World, held: str, tensors: Mapping[str, Tensor], scalars: Mapping[str, Any]) -> dict[str, Tensor]:
    trained = parameters(held.split()[world.rank])
    optimizer = grouped(trained)
    names_of_all().load(slots(trained), optimizer, tensors, scalars)
    moved(trained, optimizer, 1)
    return {name: tensor.detach() for name, tensor in trained}


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
@pytest.mark.parametrize("held", ["ac bd", "bd ac", "a bcd"])
def test_groups_that_only_some_ranks_have_keep_their_numbers(held: str) -> None:
    trained = parameters("abcd")
    optimizer = grouped(trained)
    moved(trained, optimizer, 2)
    expected, expected_scalars = get_optimizer_state(trained, optimizer)
    assert {"group 0/step", "group 1/step"} <= expected.keys()
    answers = worlds.run(2, told, held)
    for tensors, scalars, _ in answers:
        assert list(tensors) == list(expected)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())
        assert scalars == expected_scalars
    speakers = [name for _, _, shards in answers for name in shards]
    assert sorted(speakers) == sorted(expected)
    loaded = parameters("abcd")
    other = grouped(loaded)
    moved(loaded, other, 0)
    names_of_all().load(slots(loaded), other, expected, expected_scalars)
    moved(loaded, other, 1)
    found = {
        name: tensor
        for each in worlds.run(2, went_on, held, expected, expected_scalars)
        for name, tensor in each.items()
    }
    assert all(torch.equal(found[name], tensor) for name, tensor in loaded)


def test_a_state_of_another_model_is_refused() -> None:
    trained = parameters("abcd")
    foreign = {"e/exp_avg": torch.zeros(1)}
    with pytest.raises(UsageError, match="contains e, which is not a parameter of this model"):
        names_of_all().load(slots(trained), grouped(trained), foreign, {"slots": {}, "groups": [{}, {}]})
