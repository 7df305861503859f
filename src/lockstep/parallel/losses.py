"""Several losses in one step: the start of their backwards, and their totals.

A loss has a name and its own weight, such as the number of targets that count. The gradient of a step is that of
the sum over the names, each divided by the total weight of the name in the step. These weights are integers that are
known before the first forward of the step. Therefore nothing is left to divide in the update: in each micro-batch, all
losses are roots of a single backward, and the backward of each starts from 1 / weight, rounded once to the dtype of the
loss. A single loss without a name starts in the same way.

The alternative is to scale each sum to the weight of one of the losses, so that the update divides once. It would round
twice, and the scaled sums could overflow.

- **Any placement.** The start of a backward only depends on the step, and the graph only on the micro-batch. A
  micro-batch has the same gradient on every rank, and the tree adds up gradients in the same way as for a single loss.
- **One name.** There is one root, which starts from the same number. A run with one name has the bits of a run without.
- **Loss scale.** It multiplies the start of each backward, and the update divides the gradient by it once.
- **Clipping and skipped steps** see a single gradient and the total loss.

A name that has the weight 0 in the full step contributes nothing: its backward starts from 0, and its mean counts as
0. If all names have the weight 0, the update is skipped, as it is for a single loss of weight 0.

The totals of the losses are float64 and are added up by the tree, as elements of the vector that has the loss
(parallel/step_totals.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from lockstep.core.order import Step
from lockstep.core.several_losses import Loss, check_alike


class NamedLoss(NamedTuple):
    """A loss over a full step: its sum, 0-dim and float64, and its weight."""

    total: Tensor
    weight: int

    @property
    def mean(self) -> Tensor:
        """The mean loss by weight. It is 0 if the weight is 0."""
        return self.total / self.weight if self.weight else torch.zeros_like(self.total)


class Root(NamedTuple):
    """A loss of a micro-batch, times `part`, divided by `weight`.

    If the loss is a sum, `part` is 1. If it is a mean, `part` is its weight in the micro-batch. If that is 0, the mean
    is over nothing, and is left out.
    """

    loss: Tensor
    part: int
    weight: int


@final
@dataclass(frozen=True, eq=False)
class Losses:
    """The losses of a micro-batch, in the order of their names.

    If a mean over nothing is left out, the backward must still reach all parts of the model that it reaches on other
    ranks. In this case, `outputs` are the outputs of the model, and zeros flow back from them.
    """

    roots: Sequence[Root]
    outputs: Sequence[tuple[GradientEdge, Tensor]] = ()

    @property
    def sums(self) -> Tensor:
        """The sums over the micro-batch as a float64 vector."""
        return torch.stack([_sum(root) for root in self.roots])


def losses_of_task(loss: Loss, step: Step) -> Tensor | Losses:
    """Return the losses of a task for a micro-batch. Raises UsageError if its names aren't those of the weights."""
    if isinstance(loss, Tensor) and step.weights is None:
        return loss
    check_alike(loss, step.weight if step.weights is None else step.weights)
    assert isinstance(loss, Mapping)
    assert step.weights is not None
    return Losses([Root(loss[name], 1, weight) for name, weight in step.weights.items()])


def named_totals(sums: Tensor, step: Step) -> dict[str, NamedLoss]:
    """Return the losses of a step by name, from the vector of their sums."""
    assert step.weights is not None
    return {name: NamedLoss(sums[index], weight) for index, (name, weight) in enumerate(step.weights.items())}


def total_loss(losses: Mapping[str, NamedLoss]) -> Tensor:
    """Return the loss of a step with several losses: the sum of their means, added in the order of their names."""
    first, *rest = (loss.mean for loss in losses.values())
    for mean in rest:
        first = first + mean
    return first


def _sum(root: Root) -> Tensor:
    if not root.part:
        return torch.zeros((), dtype=torch.float64, device=root.loss.device)
    loss = root.loss.detach().double()
    return loss if root.part == 1 else loss * root.part
