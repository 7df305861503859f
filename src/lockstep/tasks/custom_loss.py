"""Custom losses: functions of outputs and targets that return a sum or a value for each sample."""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from lockstep.common.importing import import_callable
from lockstep.common.user_code import UserCode
from lockstep.errors import UsageError

Loss = Callable[[Tensor, Tensor], Tensor]

PATH_MARK: Final = ":"  # a loss name that contains this character is an import path


def import_custom_loss(path: str) -> Loss:
    """Import the loss function at `path`. Errors in the function are reported with their file and line."""
    loss = import_callable(path, "loss", "a function of outputs and targets")
    code = UserCode(f"loss {path}")

    def call_loss(outputs: Tensor, targets: Tensor) -> Tensor:
        with code:
            value: Tensor = loss(outputs, targets)
            return value

    return call_loss


def sum_loss(loss: Any, outputs: Tensor) -> Tensor:
    """Return the sum of the loss that a loss function returned for `outputs`.

    Raises UsageError unless the loss is a float tensor with a single sum or a value for each sample, and requires a
    gradient if the outputs do.
    """
    samples = len(outputs)
    if not isinstance(loss, Tensor):
        raise UsageError(f"loss: the function returned {type(loss).__name__}; return a tensor")
    if loss.shape not in ((), (samples,)):
        raise UsageError(
            f"loss: the function returned shape {tuple(loss.shape)} for {samples} samples; "
            f"return a sum of shape (), or one value per sample of shape ({samples},)"
        )
    if not loss.is_floating_point():
        raise UsageError(f"loss: the function returned values of {loss.dtype}; return floats")
    if outputs.requires_grad and not loss.requires_grad and torch.is_grad_enabled():
        raise UsageError(
            "loss: the function returned a value without a gradient; compute it from the outputs with torch functions "
            "only, without detach()"
        )
    return loss.sum()


def check_is_sum(loss: Loss, output: Tensor, target: Tensor) -> None:
    """Raise UsageError if `loss` returns neither a sum nor a value for each sample, or if it modifies its arguments.

    The loss is tested with two copies of the sample in `output` and `target`. If it were a mean, the weight of a sample
    would depend on the size of its micro-batch.
    """
    outputs, targets = torch.cat([output, output]), torch.cat([target, target])
    copies = outputs.clone(), targets.clone()
    pair_loss, single_loss = loss(outputs, targets), loss(outputs[:1], targets[:1])
    if not (torch.equal(outputs, copies[0]) and torch.equal(targets, copies[1])):
        raise UsageError("loss: the function modifies its arguments, which are used again; modify copies of them")
    pair_sum, single_sum = sum_loss(pair_loss, outputs), sum_loss(single_loss, outputs[:1])
    if pair_loss.ndim == 0 and is_mean(single_sum, pair_sum):
        raise UsageError(
            f"loss: the function returned {pair_sum.item():.6g} for two identical samples and {single_sum.item():.6g} "
            f"for one, so it is a mean; return the sum (reduction='sum'), or one value per sample (reduction='none')"
        )


def is_mean(single_loss: Tensor, pair_loss: Tensor) -> bool:
    """Return whether a loss is a mean, that is, whether two identical samples have the same loss as one sample."""
    return bool(single_loss != 0 and torch.isclose(pair_loss, single_loss))
