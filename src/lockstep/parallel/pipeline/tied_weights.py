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
class _LookedUp(local):
    """The number of look-ups in each embedding table during a forward. Interleaved forwards have separate threads."""

    def __init__(self) -> None:
        self.times: Counter[nn.Module] = Counter()


@final
class TiedWeights:
    """The tied weights of a model, given the stages of its tensors. Weights lent to this rank have values here."""

    def __init__(self, model: nn.Module, owner: Mapping[str, int], borrower: Mapping[str, int]) -> None:
        tensors = [*model.named_parameters(), *model.named_buffers()]
        shared_tensors = [(name, tensor) for name, tensor in tensors if name in borrower]
        self.all = [
            TiedWeight(number, name, tensor, owner[name], borrower[name])
            for number, (name, tensor) in enumerate(shared_tensors)
        ]
        self._looked_up = _LookedUp()
        self._loan_of: dict[nn.Module, TiedWeight] = {}
        for module in model.modules():
            for loan in self.all:
                if isinstance(module, nn.Embedding) and module.weight is loan.tensor:
                    self._loan_of[module] = loan
                    module.register_forward_pre_hook(self._count)

    def of_owner(self, stage: int) -> Iterator[TiedWeight]:
        """Yield the weights that a stage lends and receives gradients for."""
        return (loan for loan in self.all if loan.owner == stage and loan.tensor.requires_grad)

    def of_borrower(self, stage: int) -> Iterator[TiedWeight]:
        """Yield the weights that a stage borrows and computes gradients for."""
        return (loan for loan in self.all if loan.borrower == stage and loan.tensor.requires_grad)

    @torch.no_grad()
    def convert(self, stages: Mapping[int, object], dtype: torch.dtype) -> None:
        """Convert borrowed weights to the compute dtype, as weights.py does for all other weights."""
        for loan in self.all:
            if loan.borrower in stages and loan.owner not in stages and isinstance(loan.tensor, nn.Parameter):
                loan.tensor.data = loan.tensor.data.to(dtype)
                if loan.tensor.requires_grad:
                    loan.tensor.grad_dtype = None

    def begin_forward(self) -> None:
        """Reset the number of look-ups. Call this before each forward of a stage."""
        self._looked_up.times.clear()

    def end_forward(self) -> None:
        """Raise TrainingError if a forward looked up a lent table twice, because the bits would depend on the order."""
        for table, times in self._looked_up.times.items():
            if times > 1:
                loan = self._loan_of[table]
                raise TrainingError(
                    f"strategy pipeline: {loan.name} is used by stages {loan.owner} and {loan.borrower}, and its "
                    f"embedding is called more than once in a forward; untie the weights, or use a different strategy"
                )

    def _count(self, module: nn.Module, inputs: Any) -> None:
        self._looked_up.times[module] += 1
