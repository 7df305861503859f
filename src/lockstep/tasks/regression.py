"""Regression of one or more numbers per sample, with squared error, absolute error, Huber loss or a custom loss."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Final, final

import torch
from torch import Tensor
from torch.nn import functional as F

from lockstep.common.names import format_choices
from lockstep.core.batch import Batch, Inputs
from lockstep.errors import UsageError
from lockstep.tasks.base import LOSS, MetricValues, Monitor, TaskReport
from lockstep.tasks.batches import get_predictions, get_targets, split_batch
from lockstep.tasks.custom_loss import PATH_MARK, Loss, import_custom_loss, sum_loss

LOSSES: Final = ("mse", "mae", "huber")


@final
@dataclass(frozen=True)
class Regression:
    """A task whose targets are floats of shape [n] or [n, ...].

    Outputs have the same shape as the targets, except that either may lack a last dim of size 1. The loss of a sample
    is the mean over its values, as in torch. `delta` is the parameter of the Huber loss. The weight of a batch is its
    number of samples.
    """

    loss_name: str = "mse"
    delta: float = 1.0
    custom_loss: Loss | None = None
    model_name: str = "model"
    counts_samples: ClassVar[bool] = True
    unit: ClassVar[str] = "samples"
    fractions: ClassVar[tuple[str, ...]] = ()  # R2 isn't a fraction, because it can be negative
    monitor: ClassVar[Monitor] = LOSS

    def inputs(self, batch: Batch) -> Inputs:
        """See Task."""
        return split_batch(batch).inputs

    def weight(self, batch: Batch) -> int:
        """See Task."""
        return len(get_targets(batch))

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """See Task."""
        prediction, targets = match_shapes(self.model_name, outputs, batch)
        if self.custom_loss is not None:
            return sum_loss(self.custom_loss(prediction, targets), prediction)
        values_per_sample = max(targets.numel() // max(len(targets), 1), 1)
        losses: dict[str, Callable[..., Tensor]]
        losses = {"mse": F.mse_loss, "mae": F.l1_loss, "huber": partial(F.huber_loss, delta=self.delta)}
        return losses[self.loss_name](prediction, targets, reduction="sum") / values_per_sample

    def sums(self, outputs: Any, batch: Batch) -> dict[str, Tensor]:
        """Return float64 sums of the errors, the targets and their squares for each output, and the sample count."""
        prediction, targets = (
            tensor.detach().double().flatten(1)
            for tensor in match_shapes(self.model_name, outputs, batch, at_least_2d=True)
        )
        errors = prediction - targets
        return {
            "absolute": errors.abs().sum(0),
            "squared": errors.square().sum(0),
            "targets": targets.sum(0),
            "targets_squared": targets.square().sum(0),
            "counted": torch.tensor(len(targets)),
        }

    def figures(self, sums: Mapping[str, Tensor]) -> MetricValues:
        """Return the root mean squared error, the mean absolute error, and R2 averaged over the outputs."""
        counted = max(int(sums["counted"]), 1)
        r2 = [_compute_r2(*column) for column in zip(*_list_sums_by_output(sums), strict=True)]
        return {
            "rmse": math.sqrt(float(sums["squared"].mean()) / counted),
            "mae": float(sums["absolute"].mean()) / counted,
            "r2": math.fsum(r2) / max(len(r2), 1),
        }

    def details(self, outputs: Any, batch: Batch) -> dict[str, Tensor]:
        """See Task."""
        return {}

    def report(self, sums: Mapping[str, Tensor]) -> TaskReport:
        """Return R2 and the errors of each output, or an empty dict if there is only one output."""
        counted = max(int(sums["counted"]), 1)
        if len(sums["squared"]) < 2:
            return {}
        return {
            "r2": [_compute_r2(*column) for column in zip(*_list_sums_by_output(sums), strict=True)],
            "rmse": (sums["squared"] / counted).sqrt().tolist(),
            "mae": (sums["absolute"] / counted).tolist(),
        }

    def check(self, outputs: Any, batch: Batch) -> None:
        """See Task."""
        targets = get_targets(batch)
        if not targets.is_floating_point():
            raise UsageError(
                f"targets: expected floats, got {targets.dtype}; convert the targets, or choose another recipe.task"
            )
        if not targets.isfinite().all():
            raise UsageError("targets: a value is not finite; remove such samples from the data")
        match_shapes(self.model_name, outputs, batch)


def regression(model: str, loss: str = "mse", delta: float | None = None) -> Regression:
    """Create the task from recipe options. `loss` is mse, mae, huber or package.module:function."""
    if PATH_MARK not in loss and loss not in LOSSES:
        suggestions = format_choices(loss, (*LOSSES, "package.module:function"))
        raise UsageError(f"recipe.task.loss: {loss} is not a loss for regression{suggestions}")
    if delta is not None and loss != "huber":
        raise UsageError(f"recipe.task.delta: only used by the loss huber, not by {loss}; remove it")
    if delta is not None and not delta > 0:
        raise UsageError(f"recipe.task.delta: must be greater than 0, got {delta}")
    if PATH_MARK in loss:
        return Regression(custom_loss=import_custom_loss(loss), model_name=model)
    return Regression(loss, Regression.delta if delta is None else delta, model_name=model)


def match_shapes(model: str, outputs: Any, batch: Batch, at_least_2d: bool = False) -> tuple[Tensor, Tensor]:
    """Return predictions and targets with the same shape and dtype, which is at least float32.

    If `at_least_2d` is True, both have at least two dims. Raises UsageError if the shapes don't match.
    """
    prediction, targets = get_predictions(outputs, model), get_targets(batch)
    if prediction.ndim == targets.ndim + 1 and prediction.shape[-1] == 1:
        prediction = prediction.squeeze(-1)
    elif targets.ndim == prediction.ndim + 1 and targets.shape[-1] == 1:
        targets = targets.squeeze(-1)
    if prediction.shape != targets.shape:
        raise UsageError(
            f"{model}: the shape {list(prediction.shape)} of the outputs does not match the shape "
            f"{list(targets.shape)} of the targets; return "
            f"{f'shape {list(targets.shape[1:])}' if targets.ndim > 1 else 'one number'} per sample"
        )
    if prediction.dtype in (torch.float16, torch.bfloat16):
        prediction = prediction.float()
    targets = targets.to(prediction.dtype)
    return (prediction[:, None], targets[:, None]) if at_least_2d and prediction.ndim == 1 else (prediction, targets)


def _list_sums_by_output(sums: Mapping[str, Tensor]) -> list[list[float]]:
    counted = [float(sums["counted"])] * len(sums["squared"])
    return [*(sums[name].tolist() for name in ("squared", "targets", "targets_squared")), counted]


def _compute_r2(squared: float, total: float, total_squared: float, counted: float) -> float:
    """Return the coefficient of determination. If all targets are equal, this is 1 without errors, and 0 otherwise."""
    spread = total_squared - total * total / max(counted, 1.0)
    if spread <= 0:
        return float(squared == 0)
    return 1.0 - squared / spread
