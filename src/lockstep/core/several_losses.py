"""Names, weights, totals and means of several losses in a task or training loop."""

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from lockstep.errors import UsageError

Loss = Tensor | Mapping[str, Tensor]  # 0-dim sum of a loss over a batch, or several such sums by name
Weight = int | Mapping[str, int]  # the divisor of the loss, or the divisor of each loss by name

LOSS: Final = "loss"
_LOSS_PREFIX: Final = "loss/"  # prefix of the names of losses in the sums and metrics of a task
_WEIGHT_PREFIX: Final = "weight/"


def check_weights(label: str, weights: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the weights of several losses, sorted by name.

    Raises UsageError if a name isn't a valid identifier. The message begins with `label`. The values aren't checked.
    """
    if not weights:
        raise UsageError(f"{label} returned an empty mapping; return an integer for the name of each loss")
    invalid = next((name for name in weights if not isinstance(name, str) or not name.isidentifier()), None)
    if invalid is not None:
        raise UsageError(
            f"{label} returned the name {invalid!r}; name losses with letters, digits and underscores, such as "
            f"second_head"
        )
    return {name: weights[name] for name in sorted(weights)}


def get_loss_names(value: Loss | Weight) -> tuple[str, ...] | None:
    """Return the sorted names of several losses or weights, or None for a single unnamed loss or weight."""
    return tuple(sorted(value)) if isinstance(value, Mapping) else None


def describe_names(names: tuple[str, ...] | None, single: str) -> str:
    """Describe the names of losses for an error message. `single` describes a single unnamed loss."""
    return single if names is None else f"the names {', '.join(names)}" if len(names) > 1 else f"the name {names[0]}"


def add_losses(loss: Loss) -> Tensor:
    """Return the sum of the losses. Ignores their weights, so only use it to examine a task."""
    return torch.stack(list(loss.values())).sum() if isinstance(loss, Mapping) else loss


def make_loss_sums(loss: Loss, weight: Weight) -> dict[str, Tensor]:
    """Return the losses and weights of a batch, keyed by their names in the sums of a task (`loss/NAME`)."""
    if isinstance(loss, Mapping) and isinstance(weight, Mapping):
        losses = {f"{_LOSS_PREFIX}{name}": value for name, value in loss.items()}
        return losses | {f"{_WEIGHT_PREFIX}{name}": torch.tensor(value) for name, value in weight.items()}
    check_same_names(loss, weight)
    assert isinstance(loss, Tensor)
    return {LOSS: loss, "weight": torch.tensor(weight)}


def check_same_names(loss: Loss, weight: Weight, task: str = "task") -> None:
    """Raise UsageError if the losses and the weights of a task have different names."""
    losses, weights = get_loss_names(loss), get_loss_names(weight)
    if losses != weights:
        raise UsageError(
            f"{task}: loss returned {describe_names(losses, 'a single tensor')}, but weight returned "
            f"{describe_names(weights, 'a single integer')}; return the same names from both"
        )


def add_total(sums: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return `sums`, the sums of a task over all batches. Adds the total loss as `loss` if there are several losses.

    The total loss is the sum of the mean losses.
    """
    means = compute_loss_means(sums)
    if not means:
        return sums
    total = torch.tensor(sum(means.values()), dtype=torch.float64)
    return {LOSS: total, **sums}


def compute_loss_means(sums: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the mean of each loss over all batches under its name in the metrics (`loss/NAME`).

    The mean of a loss with weight 0 is 0. Returns {} if there is only a single unnamed loss.
    """
    names = sorted(key.removeprefix(_WEIGHT_PREFIX) for key in sums if key.startswith(_WEIGHT_PREFIX))
    return {
        f"{_LOSS_PREFIX}{name}": float(sums[f"{_LOSS_PREFIX}{name}"]) / weight
        if (weight := int(sums[f"{_WEIGHT_PREFIX}{name}"]))
        else 0.0
        for name in names
    }


def is_reserved(name: str) -> bool:
    """Return whether the name of a sum or a metric is reserved for a loss or its weight."""
    return name.startswith((_LOSS_PREFIX, _WEIGHT_PREFIX))
