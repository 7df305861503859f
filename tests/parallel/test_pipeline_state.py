"""Optimizers that look at all parameters at once are found before a pipeline trains with them."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.errors import UsageError
from lockstep.parallel.layerwise import Norms
from lockstep.parallel.optimize import make_optimizer
from lockstep.parallel.optimizer_state import Named
from lockstep.parallel.pipeline_state import check_separable


def made(trained: Sequence[Named], norms: Norms, name: str, options: Mapping[str, Any]) -> torch.optim.Optimizer:
    return make_optimizer(trained, name=name, lr=0.1, norms=norms, options=options)


@pytest.mark.parametrize("name", ["sgd", "adamw", "adagrad", "lamb", "lars", "nadamw", "rprop", "adan", "lambc"])
def test_optimizers_that_work_on_one_parameter_at_a_time_are_taken(name: str) -> None:
    options = {"max_grad_norm": None} if name == "lambc" else {}
    check_separable(partial(made, name=name, options=options), (0, 1, 2, 4))


@pytest.mark.parametrize("dims", [(1,), (2, 4)])
def test_an_optimizer_that_clips_is_refused(dims: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="optimizer Lamb: what it does to one parameter depends on the others"):
        check_separable(partial(made, name="lambc", options={}), dims)


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
        check_separable(lambda trained, norms: Averaging([tensor for _, tensor in trained]), (2,))
