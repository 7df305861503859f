"""What a loop of the user's own may give to a backward: a loss that is a sum, as far as that can be seen."""

from __future__ import annotations

from typing import Any, Final

from torch import Tensor

from lockstep.own_code import refused

_MEAN: Final = 1  # at::Reduction
_PASSING: Final = ("ToCopyBackward", "ViewBackward", "SqueezeBackward", "AliasBackward", "CloneBackward")


def check_loss(step: int, loss: Any) -> None:
    """Raise UsageError, with the line that is calling, where `loss` is no 0-dim tensor with a graph, or a mean."""
    if not isinstance(loss, Tensor) or loss.ndim or not loss.is_floating_point():
        found = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise refused(f"step {step}: step.backward was given {found}", "give the loss added up, a 0-dim tensor")
    if loss.grad_fn is None:
        raise refused(
            f"step {step}: the loss has no graph that leads to the model",
            "compute it from what the model returns, without detach, no_grad or loss.backward() of your own",
        )
    if _is_mean(loss.grad_fn):
        raise refused(
            f"step {step}: the loss is a mean, which micro-batches of other sizes would not add up to",
            'give the sum, as with reduction="sum"; step.update divides by the weight of the whole step',
        )


def _is_mean(node: Any) -> bool:
    """Return whether the last operation of a graph is a mean, by its name or by the reduction that it has kept."""
    while node.name().startswith(_PASSING) and node.next_functions[0][0] is not None:
        node = node.next_functions[0][0]
    return node.name().startswith("MeanBackward") or getattr(node, "_saved_reduction", None) == _MEAN
