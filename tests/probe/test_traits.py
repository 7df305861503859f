"""What of a model may depend on the strategy is found by looking at it and at its forwards."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lockstep.parallel.gradients import BucketedGradientSum
from lockstep.probe.traits import ModelTraits


class Strided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3).t())

    def forward(self, x):
        return x @ self.weight


class Clamped(nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            self.weight.clamp_(-0.01, 0.01)
        return super().forward(x)


class Net(nn.Module):
    def __init__(self, part: nn.Module, times=(1, 1), reentrant: bool | None = None) -> None:
        super().__init__()
        self.part, self.times, self.reentrant = part, iter(times), reentrant

    def forward(self, x):
        for _ in range(next(self.times)):
            x = x + (self.part(x) if self.reentrant is None else checkpoint(self.part, x, use_reentrant=self.reentrant))
        return x


def hooked() -> nn.Module:
    part = nn.Linear(3, 3)
    part.weight.register_hook(lambda gradient: gradient * 2)
    return part


def found(model: nn.Module) -> list[str]:
    traits = ModelTraits()
    traits.wrap_builder(lambda: model)()
    for _ in range(2):
        model(torch.randn(2, 3, requires_grad=True)).sum().backward()
    return traits.describe()


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Strided, "weight is not contiguous (strides (1, 3))"),
        (lambda: Clamped(3, 3), "weight is written in the forward"),
        (lambda: Net(hooked()), "part.weight has a gradient hook"),
        (lambda: Net(nn.Linear(3, 3), reentrant=True), "part is recomputed by a reentrant checkpoint"),
        (lambda: Net(nn.Linear(3, 3), times=(2, 2)), "part is called 2 times in a forward"),
        (lambda: Net(nn.Linear(3, 3), times=(1, 0)), "part is called in some forward passes and skipped in others"),
    ],
)
def test_a_trait_that_may_depend_on_the_strategy_is_named(model, words: str) -> None:
    [text] = found(model())
    assert words in text


def test_hooks_of_lockstep_are_no_traits() -> None:
    part = nn.Linear(3, 3)
    part.weight.register_post_accumulate_grad_hook(partial(BucketedGradientSum._on_gradient_ready, None, None))
    traits = ModelTraits()
    traits.watch(Net(part))
    assert traits.describe() == []


def test_a_plain_model_and_one_with_plain_checkpoints_have_none() -> None:
    assert found(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))) == []
    assert found(Net(nn.Linear(3, 3), reentrant=False)) == []


def test_hooks_on_accumulating_nodes_are_found_in_the_code(tmp_path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("node = p.view_as(p).grad_fn.next_functions[0][0]\nnode.register_hook(print)\n")
    module = type(pytest)("mine")
    module.__file__ = str(file)
    assert "mine registers hooks on AccumulateGrad nodes" in ModelTraits().describe(iter([("mine", module)]))[0]
