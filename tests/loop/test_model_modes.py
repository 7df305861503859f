"""Which models depend on their mode, and what a loop is told that trains one in evaluation."""

from typing import Any

import loops
import pytest
import torch
from one_process import joined
from torch import Tensor, nn
from torch.nn import functional as F

import lockstep
from lockstep.loop.model_modes import find_mode_dependent_layer, is_in_evaluation_mode


class DropPath(nn.Module):
    """As timm's: a probability of 0 leaves nothing out."""

    def __init__(self, drop_prob: float) -> None:
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.drop_prob, self.training)


class TwoHeads(nn.Module):
    """As torchvision's GoogLeNet: it returns something else in training."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x if self.training else x


class Plain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize(
    ("layer", "depends"),
    [
        (nn.Dropout(0.1), True),
        (nn.Dropout(0.0), False),
        (nn.BatchNorm1d(3), True),
        (nn.BatchNorm1d(3, track_running_stats=False), False),
        (nn.InstanceNorm1d(3), False),
        (nn.LSTM(3, 3, num_layers=2, dropout=0.1), True),
        (nn.LSTM(3, 3, num_layers=2), False),
        (nn.MultiheadAttention(4, 2, dropout=0.1), True),
        (nn.MultiheadAttention(4, 2), False),
        (nn.LayerNorm(3), False),
        (DropPath(0.1), True),
        (DropPath(0.0), False),
        (TwoHeads(), True),
        (Plain(), False),
    ],
)
def test_a_layer_depends_on_its_mode_by_class_settings_and_forward(layer: nn.Module, depends: bool) -> None:
    found = find_mode_dependent_layer(nn.Sequential(nn.Linear(3, 3), layer))
    assert found == (f"1, a {type(layer).__name__}" if depends else "")


def test_a_model_is_in_evaluation_if_all_that_has_a_forward_is() -> None:
    model = nn.ModuleDict({"a": nn.Linear(1, 1).eval(), "b": nn.Linear(1, 1).eval()})
    assert is_in_evaluation_mode(model)
    model["b"].train()
    assert not is_in_evaluation_mode(model)


def train(model: nn.Module, between: Any = lambda model: None) -> Tensor:
    """Train one epoch of a model, as it comes, and return how many batches its BatchNorm has counted."""
    with joined() as run:
        model, _ = run.place(model, torch.optim.SGD(model.parameters(), lr=0.1))
        between(model)
        for step, *batch in loops.micro_batches(loops.steps(run)):
            step.backward(sum=loops.loss(model, batch))
        return model[1].num_batches_tracked.clone()  # type: ignore[index]


def test_a_model_that_came_in_evaluation_mode_is_refused_in_the_first_step() -> None:
    with pytest.raises(
        lockstep.UsageError, match=r"evaluation mode, .* but the result of 1, a BatchNorm1d, .*call model.train\(\)"
    ):
        train(loops.net().eval())


def test_a_model_without_layers_that_depend_on_it_trains_in_evaluation_mode() -> None:
    with joined() as run:
        model = nn.Sequential(nn.Linear(6, 3)).eval()
        run.place(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step, *batch in loops.micro_batches(loops.steps(run)):
            step.backward(sum=loops.loss(model, batch))


def test_a_loop_may_train_in_evaluation_mode_on_purpose_and_then_counts_no_batches() -> None:
    assert train(loops.net(), nn.Module.eval) == 0
    assert train(loops.net().eval(), nn.Module.train) == 3
