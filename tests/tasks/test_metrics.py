"""Metrics of the user's own: sums beside the task's, figures over the weight, and what is refused."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.errors import UsageError
from lockstep.tasks.base import LOSS
from lockstep.tasks.custom import add_metrics, check_metrics, find_metrics

OUTPUTS, BATCH = torch.tensor([[1.0], [3.0]]), (torch.zeros(2), torch.tensor([0.5, 1.0]))


def absolute(outputs: Tensor, batch: Any) -> dict[str, Tensor]:
    return {"absolute": (outputs[:, 0] - batch[1]).abs().sum(), "above": (outputs[:, 0] > batch[1]).sum()}


def mean(outputs: Tensor, batch: Any) -> dict[str, Tensor]:
    return {"absolute": (outputs[:, 0] - batch[1]).abs().mean()}


def nothing(outputs: Tensor, batch: Any) -> None:
    """Return no mapping."""


def vector(outputs: Tensor, batch: Any) -> dict[str, Tensor]:
    return {"each": outputs[:, 0]}


def taken(outputs: Tensor, batch: Any) -> dict[str, int]:
    return {"top1": 1}


def reserved(outputs: Tensor, batch: Any) -> dict[str, int]:
    return {"lr": 1}


def broken(outputs: Tensor, batch: Any) -> dict[str, int]:
    raise KeyError("label")


number = 3


@pytest.fixture
def task() -> Any:
    return SimpleNamespace(
        loss=lambda outputs, batch: outputs.sum(),
        sums=lambda outputs, batch: {"correct": torch.tensor(1)},
        figures=lambda sums: {"top1": 0.5},
        monitor=LOSS,
    )


def named(name: str) -> list[str]:
    return [f"{__name__}:{name}"]


def test_figures_are_sums_over_the_weight(task: Any) -> None:
    found = add_metrics(task, named("absolute"))
    sums = {**found.sums(OUTPUTS, BATCH), "weight": torch.tensor(4), "loss": torch.tensor(1.0)}
    assert found.figures(sums) == {"top1": 0.5, "absolute": 2.5 / 4, "above": 2 / 4}
    assert found.monitor == LOSS
    check_metrics(find_metrics(named("absolute")), OUTPUTS, BATCH)
    check_metrics(find_metrics(named("absolute")), OUTPUTS.to("meta"), BATCH)


def test_without_metrics_the_task_is_itself(task: Any) -> None:
    assert add_metrics(task, []) is task


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("mean", r"absolute is 1\.25 for two samples, but adds up to 2\.5 over the single samples; return"),
        ("nothing", "returned NoneType; return a mapping of names to sums"),
        ("vector", r"each has shape \(2,\) and torch\.float32; return real 0-dim sums"),
        ("reserved", "lr is a name that Lockstep uses for evaluations; choose a different name"),
        ("broken", r"KeyError: 'label' \(.*test_metrics\.py:\d+\); fix it there"),
    ],
)
def test_what_is_no_sum_is_refused(name: str, told: str) -> None:
    with pytest.raises(UsageError, match=f"metric {__name__}:{name}: {told}"):
        check_metrics(find_metrics(named(name)), OUTPUTS, BATCH)


def test_a_name_that_is_taken_is_refused(task: Any) -> None:
    found = add_metrics(task, named("taken"))
    with pytest.raises(UsageError, match="a metric top1 already exists"):
        found.figures({**found.sums(OUTPUTS, BATCH), "weight": torch.tensor(4)})


def test_what_is_no_function_is_refused(task: Any) -> None:
    with pytest.raises(UsageError, match=r"expected a function .*, got an object of type int"):
        add_metrics(task, named("number"))
