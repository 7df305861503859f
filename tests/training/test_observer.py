"""An observer finds where a value stops being finite, and says what it saw of each module."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.tasks.base import MicroBatch
from lockstep.training.observer import BATCH, NonFinite, Observer, StepObservations

SAMPLES = 3


class Changed(nn.Module):
    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        return self.change(x * 1.0)


def observed(change: Callable[[Tensor], Tensor], x: Tensor) -> StepObservations:
    model, found = nn.Sequential(nn.Identity(), Changed(change)), StepObservations()
    observer = Observer(MicroBatch(5, (x,), SAMPLES, SAMPLES), found)
    with observer.observing(model):
        model(x).sum()
    return found


def column(*values: float) -> Tensor:
    return torch.tensor(values)[:, None]


@pytest.mark.parametrize(
    ("change", "values", "first"),
    [
        (torch.sqrt, (1.0, -1.0, 4.0), NonFinite("NaN", "1", "sqrt", "forward", 5, 1)),
        (Tensor.sqrt_, (1.0, 4.0, -1.0), NonFinite("NaN", "1", "sqrt", "forward", 5, 2)),
        (Tensor.log_, (1.0, 0.0, 1.0), NonFinite("inf", "1", "log", "forward", 5, 1)),
        (lambda x: x - x, (1.0, torch.inf, 1.0), NonFinite("NaN", "1", "sub", "forward", 5, 1)),
        (torch.neg, (1.0, 1.0, torch.nan), NonFinite("NaN", BATCH, "", "forward", 5, 2)),
        (torch.neg, (1.0, torch.inf, 1.0), None),
    ],
    ids=["an operation", "in place", "in place, an infinity", "of an infinity", "in the batch", "as it was given"],
)
def test_the_first_value_that_is_not_finite_is_found(
    change: Callable[[Tensor], Tensor], values: tuple[float, ...], first: NonFinite | None
) -> None:
    assert observed(change, column(*values)).nonfinite == first


def test_the_largest_activation_of_a_module_is_nan_where_one_is() -> None:
    found = StepObservations()
    for largest in (1.0, float("nan"), 2.0):
        found.record_activation("1", largest)
    assert found.activations["1"] != found.activations["1"]
    assert observed(torch.neg, column(1.0, -7.0, 2.0)).activations["1"] == 7.0


def test_operations_while_it_looks_away_are_not_seen() -> None:
    found = StepObservations()
    observer = Observer(MicroBatch(0, (column(1.0),), 1, 1), found)
    with observer.observing(nn.Identity()):
        with observer.paused():
            torch.log(column(-1.0))
        assert found.nonfinite is None
        torch.log(column(-1.0))
    assert found.nonfinite is not None


def test_tensors_are_given_in_the_order_of_their_making() -> None:
    class Names:
        def __init__(self) -> None:
            self.seen: list[tuple[str, str]] = []

        def add(self, part: str, module: str, name: str, tensor: Any) -> None:
            self.seen.append((module, name))

    names = Names()
    model = Changed(torch.neg)
    x = column(1.0, 2.0, 3.0)
    with Observer(MicroBatch(0, (x,), SAMPLES, SAMPLES), StepObservations(), names).observing(model):
        model(x)
    assert names.seen == [("", ""), ("Changed", "mul"), ("Changed", "neg"), ("Changed", "the module's output")]
