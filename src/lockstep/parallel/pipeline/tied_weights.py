"""Weights that are tied between two stages of a pipeline.

The stage with the embedding owns the weights and updates them. The other stage borrows them. For each micro-batch, the
borrower sends its gradient to the owner. The owner adds its own gradient, as autograd does in a single process, before
the sum over micro-batches. Whenever the weights change, the owner sends the new values to the borrower.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from threading import local
from typing import Any, final

import torch
from torch import Tensor, nn

from lockstep.errors import TrainingError


@dataclass(frozen=True, eq=False)
class TiedWeight:
    """A tensor that stage `owner` lends to stage `borrower`. Its `number` is the same on all ranks."""

    number: int
    name: str
    tensor: Tensor
    owner: int
    borrower: int


@final
class _LookupCounts(local):
    """The number of calls of each embedding in the current forward pass.

    Thread-local, because interleaved forward passes run on separate threads.
    """

    def __init__(self) -> None:
        self.count: Counter[nn.Module] = Counter()


@final
class TiedWeights:
    """The tied weights of `model`.

    `owner_stages` and `borrower_stages` map tensor names to stages (`Ownership` in cut.py). A rank holds the values of
    the weights that its stages own or borrow.
    """

    def __init__(self, model: nn.Module, owner_stages: Mapping[str, int], borrower_stages: Mapping[str, int]) -> None:
        tensors = [*model.named_parameters(), *model.named_buffers()]
        shared_tensors = [(name, tensor) for name, tensor in tensors if name in borrower_stages]
        self.all = [
            TiedWeight(number, name, tensor, owner_stages[name], borrower_stages[name])
            for number, (name, tensor) in enumerate(shared_tensors)
        ]
        self._lookup_counts = _LookupCounts()
        self._tie_by_module: dict[nn.Module, TiedWeight] = {}
        for module in model.modules():
            for tie in self.all:
                if isinstance(module, nn.Embedding) and module.weight is tie.tensor:
                    self._tie_by_module[module] = tie
                    module.register_forward_pre_hook(self._count_lookup)

    def get_lent_weights(self, stage: int) -> Iterator[TiedWeight]:
        """Return the trainable weights that `stage` lends. It receives their gradients from the borrowers."""
        return (tie for tie in self.all if tie.owner == stage and tie.tensor.requires_grad)

    def get_borrowed_weights(self, stage: int) -> Iterator[TiedWeight]:
        """Return the trainable weights that `stage` borrows. It sends their gradients to the owners."""
        return (tie for tie in self.all if tie.borrower == stage and tie.tensor.requires_grad)

    @torch.no_grad()
    def convert(self, stages: Mapping[int, object], dtype: torch.dtype) -> None:
        """Convert this rank's borrowed weights to the compute dtype, as weights.py does for its own weights."""
        for tie in self.all:
            if tie.borrower in stages and tie.owner not in stages and isinstance(tie.tensor, nn.Parameter):
                tie.tensor.data = tie.tensor.data.to(dtype)
                if tie.tensor.requires_grad:
                    tie.tensor.grad_dtype = None

    def begin_forward(self) -> None:
        """Reset the embedding call counts of this thread. Call this before each forward pass of a stage."""
        self._lookup_counts.count.clear()

    def end_forward(self) -> None:
        """Raise TrainingError if the forward pass called the embedding of a tied weight more than once.

        The resulting gradient would depend on the order in which the look-ups are added.
        """
        for table, count in self._lookup_counts.count.items():
            if count > 1:
                tie = self._tie_by_module[table]
                raise TrainingError(
                    f"strategy pipeline: {tie.name} is used by stages {tie.owner} and {tie.borrower}, and its "
                    f"embedding is called more than once in a forward pass; untie the weights, or use a "
                    f"different strategy"
                )

    def _count_lookup(self, module: nn.Module, inputs: Any) -> None:
        self._lookup_counts.count[module] += 1
