"""A task with several losses: its names are checked, and its sums become a mean for each loss."""

from typing import Any

import pytest
import several
import torch
from torch import Tensor
from torch.nn import functional as F

from lockstep.core.several_losses import add_losses, add_total, compute_loss_means, make_loss_sums
from lockstep.errors import UsageError
from lockstep.tasks.custom import CustomTask, compute_metric_values
from lockstep.training.evaluate import compute_batch_sums, compute_task_metrics

BATCH = (torch.arange(12.0).reshape(4, 3), torch.tensor([0, 1, 2, 0]))
OUTPUTS = torch.empty(4, 3, device="meta")


class Two:
    def weight(self, batch: Any) -> Any:
        return {"right": torch.tensor(len(batch[1])), "odd": int((batch[1] == 1).sum())}

    def loss(self, outputs: Tensor, batch: Any) -> Any:
        losses = F.cross_entropy(outputs, batch[1], reduction="none")
        return {"odd": losses[batch[1] == 1].sum(), "right": losses.sum()}

    def sums(self, outputs: Tensor, batch: Any) -> Any:
        return {"count": torch.tensor(len(batch[1]))}

    def figures(self, sums: Any) -> Any:
        return {"share": sums["weight/odd"] / sums["samples"], "twice": 2 * sums["loss"]}


def changed(**members: Any) -> Any:
    """Return the task with members that return other values."""
    return type("Changed", (Two,), {name: lambda self, *_, v=value: v for name, value in members.items()})()


def test_a_task_with_names_is_complete() -> None:
    task = CustomTask("task a:B", Two())
    task.check(OUTPUTS, BATCH)
    assert task.weight(BATCH) == {"odd": 1, "right": 4}
    assert task.counts_samples is False


def test_a_loss_may_be_what_is_monitored() -> None:
    CustomTask("task a:B", type("Monitored", (Two,), {"monitor": ("loss/odd", False)})()).check(OUTPUTS, BATCH)


def test_the_figures_have_the_mean_of_each_loss() -> None:
    task, outputs = CustomTask("task a:B", Two()), torch.zeros(4, 3)
    sums = {
        name: value.double() for name, value in compute_batch_sums(task, outputs, BATCH, task.weight(BATCH)).items()
    }
    each = torch.tensor(3.0).log().item()
    expected = {"loss": 2 * each, "loss/odd": each, "loss/right": each, "share": 0.25, "twice": 4 * each}
    assert compute_task_metrics(task, sums) == pytest.approx(expected)
    assert [*compute_task_metrics(task, sums)] == [*expected]


def test_a_loss_of_weight_0_has_the_mean_0() -> None:
    sums = make_loss_sums({"a": torch.tensor(3.0), "b": torch.tensor(0.0)}, {"a": 2, "b": 0})
    assert compute_loss_means(sums) == {"loss/a": 1.5, "loss/b": 0.0}
    assert add_total(sums)["loss"] == 1.5


def test_a_single_loss_has_no_means_of_names() -> None:
    sums = make_loss_sums(torch.tensor(3.0), 2)
    assert {name: float(value) for name, value in sums.items()} == {"loss": 3.0, "weight": 2.0}
    assert (compute_loss_means(sums), add_total(sums)) == ({}, sums)
    assert float(add_losses({"a": torch.tensor(3.0), "b": torch.tensor(2.0)})) == 5.0


def test_metrics_are_divided_by_the_samples() -> None:
    sums = {"m:f/right": torch.tensor(6.0), "samples": torch.tensor(4), "weight/a": torch.tensor(2)}
    assert compute_metric_values({"m:f": lambda *_: {}}, sums, {}) == {"right": 1.5}


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (
            changed(weight=7),
            "task a:B: loss returned the names odd, right, but weight returned a single integer; return the same names",
        ),
        (changed(weight={"odd": 1}), "loss returned the names odd, right, but weight returned the name odd"),
        (changed(weight={}), "task a:B: weight returned an empty mapping; return an integer for the name of each loss"),
        (changed(weight={"a/b": 1}), "task a:B: weight returned the name 'a/b'; name losses with letters, digits and"),
        (changed(weight={"odd": 0.5, "right": 1}), "weight returned 0.5 of type float for odd; return an integer"),
        (changed(loss={"odd": 1.0, "right": torch.ones(())}), "loss returned float for odd; return the sum"),
        (changed(loss={"odd": torch.tensor(0.0), "right": torch.tensor(0.0)}), "the loss for odd has no gradient"),
        (changed(sums={"loss/odd": torch.ones(())}), "sums or details returned loss/odd, a name that Lockstep uses"),
        (changed(figures={"loss/odd": 1.0}), "figures returned loss/odd, a name that Lockstep uses"),
    ],
)
def test_names_that_do_not_match_are_refused(task: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        CustomTask("task a:B", task).check(OUTPUTS, BATCH)


def test_a_mean_by_name_is_refused() -> None:
    class Mean(Two):
        def loss(self, outputs: Tensor, batch: Any) -> Any:
            return {**super().loss(outputs, batch), "right": F.cross_entropy(outputs, batch[1])}

    with pytest.raises(UsageError, match=r"loss returned .* for right for two identical samples .* so it is a mean"):
        CustomTask("task a:B", Mean()).check(OUTPUTS, BATCH)


def test_the_tasks_of_other_tests_are_complete() -> None:
    for name in several.TASKS:
        several.task(name).check(torch.empty(6, 5, device="meta"), (torch.zeros(6, 3), torch.arange(6) % 5))
