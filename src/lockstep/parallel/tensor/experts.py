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
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from lockstep.device.meta import has_values
from lockstep.errors import UsageError
from lockstep.parallel.linear_map import linear_map
from lockstep.parallel.tensor.chunks import Region
from lockstep.parallel.tensor.layers import by_chunk, calling_with, copies


class Pairs(NamedTuple):
    """What a group is asked for: `rows` [p, d], `experts` [p] by their numbers in the group, `weights` [p]."""

    rows: Tensor
    experts: Tensor
    weights: Tensor


# Given the pairs of each of some groups: what the groups make of them, [p, d] for each.
Make = Callable[[Sequence[Pairs]], Sequence[Tensor]]


def takes_pairs(module: nn.Module) -> bool:
    """Whether the module's forward takes rows, numbers of experts and weights."""
    return len(inspect.signature(module.forward).parameters) == 3


@final
class Experts:
    """In place of the forward of `module`, whose parameters have one row of dim 0 for each expert.

    Another `make` may be put in the place of this rank's own work for the groups in `chunks.own` (dispatch.py).
    """

    def __init__(self, module: nn.Module, chunks: Region, of_group: int) -> None:
        """Take a module whose own code finds that it has `of_group` experts."""
        self.module = module
        self.chunks = chunks
        self.make: Make = self._make
        self._forward: Callable[..., Tensor] = module.forward
        self._of_group = of_group

    def __call__(self, rows: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Return what `experts` [n, k] give for `rows` [n, d], times their `weights` [n, k], for each row: [n, d]."""
        if rows.ndim != 2 or experts.ndim != 2:
            raise UsageError(
                f"recipe.model.plan: {self.chunks.name} is experts, and was called with rows of shape {[*rows.shape]} "
                f"and numbers of shape {[*experts.shape]}; they have to be [n, d] and [n, k]"
            )
        given = copies(self.chunks, [rows, weights.reshape(-1)])
        asked, places = [], []
        for at, group in enumerate(self.chunks.own):
            relative = experts.reshape(-1) - group * self._of_group
            pairs = _pairs(relative, self._of_group)
            places.append(pairs // experts.shape[-1])
            asked.append(Pairs(given[2 * at].index_select(0, places[-1]), relative[pairs], given[2 * at + 1][pairs]))
        made = zip(places, self.make(asked), strict=True)
        of_groups = [torch.zeros_like(rows).index_add(0, *each) for each in made]
        [total] = linear_map(lambda given: [self.chunks.total(given)], partial(_repeat, len(of_groups)), of_groups)
        return total

    @property
    def parameters(self) -> dict[str, Tensor]:
        """What this rank has of the module's parameters."""
        return dict(self.module.named_parameters(recurse=False))

    def compute(self, parameters: Mapping[str, Tensor], pairs: Pairs) -> Tensor:
        """Return what the group with these parameters makes of its pairs: [p, d]."""
        rows, experts, weights = pairs
        if not len(rows):  # what depends on rows and weights all the same: all ranks then do the same in backward
            return rows * weights[:, None]
        with calling_with(self.module, {**self.module._parameters, **parameters}):
            return self._forward(rows, experts[:, None], weights[:, None]).to(rows.dtype)

    def _make(self, asked: Sequence[Pairs]) -> list[Tensor]:
        of_groups = {name: by_chunk(each, self.chunks) for name, each in self.parameters.items()}
        made = []
        for at, _ in self.chunks.each(self.module.training):
            made.append(self.compute({name: each[at] for name, each in of_groups.items()}, asked[at]))
        return made


def _pairs(relative: Tensor, count: int) -> Tensor:
    """Return which pairs have one of `count` experts, given their numbers from the first of these on."""
    if not has_values(relative):  # as if all had one: for the shapes
        return torch.arange(len(relative), device=relative.device)
    return ((relative >= 0) & (relative < count)).nonzero().squeeze(1)


def _repeat(count: int, gradients: Sequence[Tensor]) -> list[Tensor]:
    return [*gradients] * count
