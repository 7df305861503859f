"""A loss of the user's own: a function of outputs and targets that gives a sum, or one value for each sample."""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from lockstep.common.importing import import_callable
from lockstep.common.own_code import OwnCode
from lockstep.errors import UsageError

Loss = Callable[[Tensor, Tensor], Tensor]

OWN: Final = ":"  # in the name of a loss: it is an import path


def find_own_loss(path: str) -> Loss:
    """Return the function that `package.module:function` names; what it raises is reported with its file and line."""
    loss = import_callable(path, "loss", "a function of outputs and targets")
    code = OwnCode(f"loss {path}")

    def call_loss(outputs: Tensor, targets: Tensor) -> Tensor:
        with code:
            value: Tensor = loss(outputs, targets)
            return value

    return call_loss


def sum_loss(loss: Any, outputs: Tensor) -> Tensor:
    """Return what a loss of `outputs` gave as their sum; UsageError where it is neither that nor a value for each."""
    samples = len(outputs)
    if not isinstance(loss, Tensor):
        raise UsageError(f"loss: the function returned {type(loss).__name__}; return a tensor")
    if loss.shape not in ((), (samples,)):
        raise UsageError(
            f"loss: the function returned shape {tuple(loss.shape)} for {samples} samples; "
            f"return a sum, of shape (), or one value for each sample, of shape ({samples},)"
        )
    if not loss.is_floating_point():
        raise UsageError(f"loss: the function returned values of {loss.dtype}; return floats")
    if outputs.requires_grad and not loss.requires_grad and torch.is_grad_enabled():
        raise UsageError(
            "loss: it carries no gradient; compute it from the outputs by torch's functions alone, without detach()"
        )
    return loss.sum()


def check_sum(loss: Loss, output: Tensor, target: Tensor) -> None:
    """Raise UsageError unless `loss` gives a sum or one value for each sample, tested with two equal samples.

    With a mean the size of a micro-batch would decide the weight of its samples. `output` and `target` have one sample.
    """
    outputs, targets = torch.cat([output, output]), torch.cat([target, target])
    given = outputs.clone(), targets.clone()
    both, one = loss(outputs, targets), loss(outputs[:1], targets[:1])
    if not (torch.equal(outputs, given[0]) and torch.equal(targets, given[1])):
        raise UsageError("loss: the function changes what it is given, which is used again; let it work on copies")
    twice, once = sum_loss(both, outputs), sum_loss(one, outputs[:1])
    if both.ndim == 0 and is_mean(once, twice):
        raise UsageError(
            f"loss: two equal samples give {twice.item():.6g}, one alone {once.item():.6g}: that is a mean; "
            f"return the sum, as with reduction='sum', or one value for each sample, as with reduction='none'"
        )


def is_mean(once: Tensor, twice: Tensor) -> bool:
    """Return whether two equal samples give what one of them does."""
    return bool(once != 0 and torch.isclose(twice, once))
