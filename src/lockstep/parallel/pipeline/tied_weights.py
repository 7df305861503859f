"""Weights that are tied between two stages of a pipeline. The stage with the embedding owns and lends these weights.

The owner trains the weights. For each micro-batch, the borrower sends its gradient to the owner. The owner adds its own
gradient, like autograd in a single process, before the sum over micro-batches. After each change of the weights, the
owner sends the new values to the borrower.
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
    """A tensor that stage `owner` lends to stage `borrower`. `number` is the same on all ranks."""

    number: int
    name: str
    tensor: Tensor
    owner: int
    borrower: int


@final
class _LookupCounts(local):
    """The look-ups in each embedding table in a forward pass. Thread-local, because forward passes can interleave."""

    def __init__(self) -> None:
        self.count: Counter[nn.Module] = Counter()


@final
class TiedWeights:
    """The tied weights of a model, given the stages of its tensors. Weights lent to this rank have values on it."""

    def __init__(self, model: nn.Module, owner: Mapping[str, int], borrower: Mapping[str, int]) -> None:
        tensors = [*model.named_parameters(), *model.named_buffers()]
        shared_tensors = [(name, tensor) for name, tensor in tensors if name in borrower]
        self.all = [
            TiedWeight(number, name, tensor, owner[name], borrower[name])
            for number, (name, tensor) in enumerate(shared_tensors)
        ]
        self._lookup_counts = _LookupCounts()
        self._tie_by_module: dict[nn.Module, TiedWeight] = {}
        for module in model.modules():
            for tie in self.all:
                if isinstance(module, nn.Embedding) and module.weight is tie.tensor:
                    self._tie_by_module[module] = tie
                    module.register_forward_pre_hook(self._count)

    def of_owner(self, stage: int) -> Iterator[TiedWeight]:
        """Yield the weights that a stage lends and receives gradients for."""
        return (tie for tie in self.all if tie.owner == stage and tie.tensor.requires_grad)

    def of_borrower(self, stage: int) -> Iterator[TiedWeight]:
        """Yield the weights that a stage borrows and computes gradients for."""
        return (tie for tie in self.all if tie.borrower == stage and tie.tensor.requires_grad)

    @torch.no_grad()
    def convert(self, stages: Mapping[int, object], dtype: torch.dtype) -> None:
        """Convert borrowed weights to the compute dtype, as weights.py does for all other weights."""
        for tie in self.all:
            if tie.borrower in stages and tie.owner not in stages and isinstance(tie.tensor, nn.Parameter):
                tie.tensor.data = tie.tensor.data.to(dtype)
                if tie.tensor.requires_grad:
                    tie.tensor.grad_dtype = None

    def begin_forward(self) -> None:
        """Reset the number of look-ups. Call this before each forward pass of a stage."""
        self._lookup_counts.count.clear()

    def end_forward(self) -> None:
        """Raise TrainingError if a forward pass looked up a lent table twice: the bits would depend on the order."""
        for table, count in self._lookup_counts.count.items():
            if count > 1:
                tie = self._tie_by_module[table]
                raise TrainingError(
                    f"strategy pipeline: {tie.name} is used by stages {tie.owner} and {tie.borrower}, and its "
                    f"embedding is called more than once in a forward; untie the weights, or use a different strategy"
                )

    def _count(self, module: nn.Module, inputs: Any) -> None:
        self._lookup_counts.count[module] += 1
