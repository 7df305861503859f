"""Several losses in one step: the seed gradients of their backward pass, and their totals.

Each loss has a name and a weight, such as the number of targets that count. The total loss of a step is the sum of all
losses, each divided by its weight in the full step. These weights are integers that are known before the first forward
pass of the step. Therefore the update doesn't have to divide gradients: in each micro-batch, all losses are roots of a
single backward pass, and the seed of each root is 1 / weight, rounded once to the dtype of the loss. A single loss
without a name has the same seed.

The alternative, scaling all losses to a common weight and dividing in the update, would round twice, and the scaled
sums could overflow.

- **Placement.** The seeds depend only on the step, and the graph depends only on the micro-batch. Therefore a
  micro-batch has the same gradient on every rank. The reduction tree adds gradients in the same way as for a single
  loss.
- **One name.** A single named loss has one root with the same seed as an unnamed loss, so its results have the same
  bits.
- **Loss scale.** The loss scale multiplies each seed, and the update divides the gradient by the loss scale once.
- **Clipping and skipped steps** use a single gradient and the total loss.

If a loss has weight 0 in the full step, its seed is 0, and its mean counts as 0. If all losses have weight 0, the
update is skipped, as for a single loss of weight 0.

The totals of the losses are float64. The reduction tree sums them as elements of the vector of step totals
(parallel/step_totals.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from lockstep.core.order import Step
from lockstep.core.several_losses import Loss, check_same_names


class NamedLoss(NamedTuple):
    """A loss over a full step: its 0-dim float64 sum and its weight."""

    total: Tensor
    weight: int

    @property
    def mean(self) -> Tensor:
        """The weighted mean of the loss, or 0 if the weight is 0."""
        return self.total / self.weight if self.weight else torch.zeros_like(self.total)


class BackwardRoot(NamedTuple):
    """A root of a backward pass: the loss of a micro-batch, with `numerator / weight` as its seed gradient.

    `weight` is the weight of the loss in the full step. If the loss is a sum, `numerator` is 1. If the loss is a mean,
    `numerator` is its weight in the micro-batch. A mean with weight 0 is undefined, and isn't a root.
    """

    loss: Tensor
    numerator: int
    weight: int


@final
@dataclass(frozen=True, eq=False)
class Losses:
    """The losses of a micro-batch, in the order of their names.

    If a mean with weight 0 is left out, the backward pass must still reach all parameters. In this case, `outputs` are
    the model outputs as additional roots, with zeros as their seed gradients.
    """

    roots: Sequence[BackwardRoot]
    outputs: Sequence[tuple[GradientEdge, Tensor]] = ()

    @property
    def sums(self) -> Tensor:
        """The sum of each loss over the micro-batch, as a float64 vector."""
        return torch.stack([_sum_over_microbatch(root) for root in self.roots])


def wrap_losses(loss: Loss, step: Step) -> Tensor | Losses:
    """Return the loss that a task computed for a micro-batch, with named losses as Losses.

    Raises UsageError unless the losses have the same names as the weights of the step.
    """
    if isinstance(loss, Tensor) and step.weights is None:
        return loss
    check_same_names(loss, step.weight if step.weights is None else step.weights)
    assert isinstance(loss, Mapping)
    assert step.weights is not None
    return Losses([BackwardRoot(loss[name], 1, weight) for name, weight in step.weights.items()])


def get_loss_sums(loss: Tensor | Losses) -> Tensor:
    """Return the detached loss of a micro-batch, or a vector with the sum of each of several losses."""
    return loss.sums if isinstance(loss, Losses) else loss.detach()


def name_totals(sums: Tensor, step: Step) -> dict[str, NamedLoss]:
    """Return the losses of a step by name. `sums` contains one sum for each loss, in the order of `step.weights`."""
    assert step.weights is not None
    return {name: NamedLoss(sums[index], weight) for index, (name, weight) in enumerate(step.weights.items())}


def compute_total_loss(losses: Mapping[str, NamedLoss]) -> Tensor:
    """Return the total loss of a step with several losses, which is the sum of their means, added in order."""
    first, *rest = (loss.mean for loss in losses.values())
    for mean in rest:
        first = first + mean
    return first


def _sum_over_microbatch(root: BackwardRoot) -> Tensor:
    if not root.numerator:
        return torch.zeros((), dtype=torch.float64, device=root.loss.device)
    loss = root.loss.detach().double()
    return loss if root.numerator == 1 else loss * root.numerator
