"""A task of the user's is made whole, and whatever is wrong with it is told with its member."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lockstep.errors import UsageError
from lockstep.tasks.base import Monitor
from lockstep.tasks.custom import CustomTask

BATCH = (torch.arange(12.0).reshape(4, 3), torch.tensor([0, 1, 2, 0]))
OUTPUTS = torch.empty(4, 3, device="meta")


class Least:
    """Has what must be there."""

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(outputs, batch[1], reduction="sum")


class Mean(Least):
    """Makes the mistake of a mean."""

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(outputs, batch[1])


class Full(Least):
    """Has more."""

    unit = "marks"
    fractions = "wrong"
    monitor = ("wrong", False)

    def inputs(self, batch: Any) -> Any:
        return {"x": batch[0]}

    def weight(self, batch: Any) -> Any:
        return (batch[1] > 0).sum()

    def sums(self, outputs: Tensor, batch: Any) -> dict[str, Tensor]:
        return {"wrong": (outputs.argmax(1) != batch[1]).sum()}

    def figures(self, sums: Any) -> dict[str, Any]:
        return {"wrong": sums["wrong"] / sums["samples"]}


def test_what_is_left_out_follows() -> None:
    task = CustomTask("task a:B", Least())
    task.check(OUTPUTS, BATCH)
    assert (task.counts_samples, task.unit, task.fractions, task.monitor) == (True, "samples", (), ("loss", False))
    assert task.weight(BATCH) == 4
    assert task.inputs(BATCH) == (BATCH[0],)
    assert (task.sums(OUTPUTS, BATCH), task.figures({}), task.details(OUTPUTS, BATCH), task.report({})) == ({},) * 4


def test_what_is_there_counts() -> None:
    task = CustomTask("task a:B", Full())
    task.check(OUTPUTS, BATCH)
    assert (task.counts_samples, task.unit, task.fractions) == (False, "marks", ("wrong",))
    assert task.monitor == Monitor("wrong", higher=False)
    assert task.weight(BATCH) == 2
    assert task.inputs(BATCH)["x"] is BATCH[0]  # type: ignore[call-overload]


def returning(member: str, value: Any) -> Any:
    """Return a task one of whose members returns `value`."""
    return type("Wrong", (Full,), {member: lambda self, *_: value})()


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (object(), "task a:B: has no method loss; add loss"),
        (Mean(), "for two identical samples and .* so it is a mean; return the sum"),
        (returning("loss", 1.0), "loss returned float; return the sum"),
        (returning("loss", torch.ones(4)), r"loss returned torch.float32 of shape \[4\]; return the sum"),
        (returning("loss", torch.tensor(2.0)), "the loss has no gradient"),
        (returning("weight", 0.5), "weight returned 0.5 of type float; return an integer"),
        (returning("weight", -1), "weight returned -1"),
        (returning("weight", True), "weight returned True of type bool"),
        (returning("sums", {"wrong": 1}), "sums returned wrong of type int; return tensors"),
        (returning("sums", [1]), "sums returned list; return a mapping"),
        (returning("figures", {"wrong": "many"}), "task a:B: figures: ValueError: could not convert"),
        (
            returning("figures", {"wrong": 1.0, "lr": 1.0}),
            "figures returned lr, a name that Lockstep uses .* a different name",
        ),
        (returning("figures", {"right": 1.0}), "monitor is wrong, but figures returned right"),
    ],
)
def test_what_is_wrong_is_told(task: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        CustomTask("task a:B", task).check(OUTPUTS, BATCH)


def test_inputs_of_another_kind_are_refused() -> None:
    with pytest.raises(UsageError, match="inputs returned int; return the arguments"):
        CustomTask("task a:B", returning("inputs", 3)).inputs(BATCH)


def test_an_error_names_its_line() -> None:
    class Fails(Least):
        def weight(self, batch: Any) -> int:
            raise KeyError("mask")

    with pytest.raises(
        UsageError, match=r"^task a:B: weight: KeyError: 'mask' \(.*test_custom_tasks.py:\d+\); fix it there$"
    ):
        CustomTask("task a:B", Fails()).weight(BATCH)


@pytest.mark.parametrize("monitor", ["wrong", ("wrong",), 3])
def test_a_monitor_is_a_name_and_a_direction(monitor: Any) -> None:
    task = type("Odd", (Least,), {"monitor": monitor})()
    with pytest.raises(UsageError, match="a metric, and whether higher is better"):
        CustomTask("task a:B", task)
