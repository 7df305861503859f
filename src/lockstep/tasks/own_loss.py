"""Custom losses: functions of outputs and targets that return a sum or one value per sample."""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from lockstep.common.importing import import_callable
from lockstep.common.own_code import OwnCode
from lockstep.errors import UsageError

Loss = Callable[[Tensor, Tensor], Tensor]

OWN: Final = ":"  # marks the name of a loss as an import path


def find_own_loss(path: str) -> Loss:
    """Return the function at `package.module:function`. Its errors are reported with file and line."""
    loss = import_callable(path, "loss", "a function of outputs and targets")
    code = OwnCode(f"loss {path}")

    def call_loss(outputs: Tensor, targets: Tensor) -> Tensor:
        with code:
            value: Tensor = loss(outputs, targets)
            return value

    return call_loss


def sum_loss(loss: Any, outputs: Tensor) -> Tensor:
    """Return the sum of the value that a loss returned for `outputs`.

    Raises UsageError unless the value is a float tensor with a sum or one value per sample, and carries a gradient if
    the outputs do.
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


def check_sum(loss: Loss, output: Tensor, target: Tensor) -> None:
    """Raise UsageError unless `loss` returns a sum or one value per sample, tested with two equal samples.

    With a mean, the weight of a sample would depend on the size of its micro-batch. A loss that modifies its arguments
    is an error too. `output` and `target` contain one sample.
    """
    outputs, targets = torch.cat([output, output]), torch.cat([target, target])
    given = outputs.clone(), targets.clone()
    both, one = loss(outputs, targets), loss(outputs[:1], targets[:1])
    if not (torch.equal(outputs, given[0]) and torch.equal(targets, given[1])):
        raise UsageError("loss: the function modifies its arguments, which are used again; modify copies of them")
    twice, once = sum_loss(both, outputs), sum_loss(one, outputs[:1])
    if both.ndim == 0 and is_mean(once, twice):
        raise UsageError(
            f"loss: the function returned {twice.item():.6g} for two equal samples and {once.item():.6g} for one, so "
            f"it is a mean; return the sum (reduction='sum'), or one value per sample (reduction='none')"
        )


def is_mean(once: Tensor, twice: Tensor) -> bool:
    """Return whether a loss is a mean: two equal samples have the loss of one sample."""
    return bool(once != 0 and torch.isclose(twice, once))
