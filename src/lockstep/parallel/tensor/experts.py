"""Experts of a mixture, whose chunks are groups of experts.

Shazeer et al. 2017, "Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts Layer". A module of
experts is given rows of features, and for each row the numbers of the experts that a gate chose, and their weights.
What has one shape and one order whoever computes it is a call of the module's own code for a *group* of experts, with
those pairs of a row and an expert alone that fell to the group, in the order of the rows. What the groups give is added
by the tree (chunks.py), and so are the gradients of the rows and weights.

Shapes: n rows, d features, k experts for each row, p pairs of a group.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lockstep.device.meta import has_values
from lockstep.parallel.tensor.chunks import Chunks
from lockstep.parallel.tensor.layers import Copies, by_chunk, calling_with


def takes_pairs(module: nn.Module) -> bool:
    """Whether the module's forward takes rows, numbers of experts and weights."""
    return len(inspect.signature(module.forward).parameters) == 3


@final
class Experts:
    """In place of the forward of `module`, whose parameters have one row of dim 0 for each expert."""

    def __init__(self, module: nn.Module, chunks: Chunks, of_group: int) -> None:
        """Take a module whose own code finds that it has `of_group` experts."""
        self.chunks = chunks
        self._module = module
        self._forward: Callable[..., Tensor] = module.forward
        self._of_group = of_group

    def __call__(self, rows: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Return what `experts` [n, k] give for `rows` [n, d], times their `weights` [n, k], for each row: [n, d]."""
        chunks = self.chunks
        parameters = dict(self._module.named_parameters(recurse=False))
        of_groups = [by_chunk(each, chunks) for each in parameters.values()]
        given = Copies.apply(chunks, rows, weights.reshape(-1))
        partials = []
        for at, group in chunks.each(self._module.training):
            own = dict(zip(parameters, (each[at] for each in of_groups), strict=True))
            with calling_with(self._module, self._module._parameters | own):
                partials.append(self._partial(group, given[2 * at], experts, given[2 * at + 1]))
        total: Tensor = _Total.apply(chunks, *partials)
        return total

    def _partial(self, group: int, rows: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Return what a group adds to each row."""
        relative = experts.reshape(-1) - group * self._of_group
        pairs = _pairs(relative, self._of_group)
        found = pairs // experts.shape[-1]
        made = self._made(rows.index_select(0, found), relative[pairs], weights[pairs])
        return torch.zeros_like(rows).index_add(0, found, made)

    def _made(self, rows: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Return what the current group gives for p pairs: `rows` [p, d], `experts` [p] of it and `weights` [p]."""
        if not len(rows):  # what depends on rows and weights all the same: all ranks then do the same in backward
            return rows * weights[:, None]
        return self._forward(rows, experts[:, None], weights[:, None]).to(rows.dtype)


def _pairs(relative: Tensor, count: int) -> Tensor:
    """Return which pairs have one of `count` experts, given their numbers from the first of these on."""
    if not has_values(relative):  # as if all had one: for the shapes
        return torch.arange(len(relative), device=relative.device)
    return ((relative >= 0) & (relative < count)).nonzero().squeeze(1)


class _Total(torch.autograd.Function):
    """The sum over all chunks."""

    @staticmethod
    def forward(ctx: Any, chunks: Chunks, *partials: Tensor) -> Tensor:
        ctx.count = len(partials)
        return chunks.total(partials)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, *([gradient] * ctx.count)
