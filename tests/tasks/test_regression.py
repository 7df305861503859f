"""Errors added over samples, against torch's means and a golden R2."""

import pytest
import torch
from torch.nn import functional as F

from lockstep.errors import UsageError
from lockstep.tasks.regression import Regression, regression

MEANS = {"mse": F.mse_loss, "mae": F.l1_loss, "huber": F.huber_loss}


@pytest.mark.parametrize("name", MEANS)
@pytest.mark.parametrize("shape", [(6,), (6, 3)])
def test_the_sum_over_the_samples_is_torchs_mean_times_them(name: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    outputs, targets = 2 * torch.randn(shape), torch.randn(shape)
    loss = Regression(name).loss(outputs, (None, targets))
    torch.testing.assert_close(loss, 6 * MEANS[name](outputs, targets))


def test_outputs_may_have_a_dim_of_one() -> None:
    outputs, targets = torch.tensor([[1.0], [3.0]]), torch.tensor([1.0, 1.0])
    assert Regression().loss(outputs, (None, targets)).item() == 4.0
    assert Regression().loss(outputs[:, 0], (None, targets[:, None])).item() == 4.0


def test_figures_golden() -> None:
    outputs, targets = torch.tensor([2.5, 0.0, 2.0, 8.0]), torch.tensor([3.0, -0.5, 2.0, 7.0])
    task = Regression()
    parts = [task.sums(outputs[cut], (None, targets[cut])) for cut in (slice(1), slice(1, None))]
    figures = task.figures({name: parts[0][name] + parts[1][name] for name in parts[0]})
    # scikit-learn's example of r2_score
    assert figures["r2"] == pytest.approx(0.9486081370449679)
    assert figures["mae"] == pytest.approx(0.5)
    assert figures["rmse"] == pytest.approx(0.375**0.5)


def test_several_outputs_are_reported_one_by_one() -> None:
    outputs, targets = torch.tensor([[1.0, 5.0], [3.0, 5.0]]), torch.tensor([[1.0, 4.0], [3.0, 6.0]])
    task = Regression()
    report = task.report(task.sums(outputs, (None, targets)))
    assert report == {"r2": [1.0, 0.0], "rmse": [0.0, 1.0], "mae": [0.0, 1.0]}
    assert task.report(task.sums(outputs[:, 0], (None, targets[:, 0]))) == {}


@pytest.mark.parametrize(
    ("outputs", "targets", "message"),
    [
        (torch.zeros(2, 3), torch.zeros(2, 2), r"\[2, 3\] of the outputs .* \[2, 2\] of the targets; .* shape \[2\]"),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int64), "targets: expected floats, got torch.int64"),
        (torch.zeros(2), torch.tensor([0.0, torch.inf]), "targets: a value is not finite"),
        (None, torch.zeros(2), "expected a tensor, or outputs with logits or out, got None"),
    ],
)
def test_what_does_not_fit_is_refused(outputs: object, targets: torch.Tensor, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Regression().check(outputs, (None, targets))


def test_options() -> None:
    assert regression("model", "huber", 2.0) == Regression("huber", 2.0)
    with pytest.raises(UsageError, match=r"recipe.task.loss: hubr is not a loss for regression; did you mean 'huber'"):
        regression("model", "hubr")
    with pytest.raises(UsageError, match="delta: must be greater than 0, got 0"):
        regression("model", "huber", 0.0)
    assert regression("model", "huber") == Regression("huber", 1.0)
    for loss in ("mse", "own.module:loss"):
        with pytest.raises(
            UsageError, match=f"recipe.task.delta: only used by the loss huber, not by {loss}; remove it"
        ):
            regression("model", loss, 1.0)
