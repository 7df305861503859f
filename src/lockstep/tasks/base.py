"""What is learned, as the engines see it: a model, a loss that is a sum, metrics that are counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

from torch import Tensor, nn

SKIPPED: Final = -100  # the target of a sample that could not be read: F.cross_entropy's ignore_index


Note = Callable[[str, Tensor], None]  # what something is, and its value


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One cut of the global batch: the unit of work, computed at the same shape whoever computes it.

    `index` is its number in the step; dim 0 of `inputs` and `targets` runs over its samples. A `shadow` is computed by
    another rank too: this one only takes part in what all do together meanwhile, and its result counts for nothing.
    `note`, where there is one, sees what the micro-batch gives: its loss, its BatchNorm statistics, and each gradient
    as it goes into the step's sum.
    """

    index: int
    inputs: Tensor
    targets: Tensor
    shadow: bool = False
    note: Note | None = field(default=None, compare=False)


class Task(Protocol):
    """A model with its loss and its metrics."""

    @property
    def name(self) -> str:
        """What errors call the model, such as `model my.nets:net`."""
        ...

    @property
    def sample(self) -> Tensor | None:
        """One input, without the dim of samples, where it is known: its shape and dtype, on the meta device."""
        ...

    def build_model(self) -> nn.Module:
        """Build the model on the CPU; the same weights in every process."""
        ...

    def loss_sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss added over the samples, never their mean: means of uneven micro-batches do not add up."""
        ...

    @property
    def count_names(self) -> tuple[str, ...]:
        """The names of what `counts` returns."""
        ...

    def counts(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Return figures that may be added over samples, such as `correct1`: 0-dim tensors."""
        ...
