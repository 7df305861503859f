"""Experts of a mixture, whose chunks are groups of experts.

Shazeer et al. 2017, "Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts Layer". A module of
experts is given rows of features, and for each row the numbers of the experts that a gate chose, and their weights.
What has one shape and one order whoever computes it is a call of the module's own code for a *group* of experts, with
those pairs of a row and an expert alone that fell to the group, in the order of the rows. What the groups give is added
by the tree (chunks.py), and so are the gradients of the rows and weights.

Where experts are on other ranks, rows go there and come back: Lepikhin et al. 2021, "GShard: Scaling Giant Models with
Conditional Computation and Automatic Sharding" (ICLR). Each rank then has micro-batches of its own and some groups of
the experts. A call goes like this, on all ranks at once:

1. Each rank sends each other the rows that its groups were chosen for, with the numbers of the experts and the weights.
2. A rank calls its groups for the rows of one rank, that is of one micro-batch, after those of another. So a call has
   the shape, the order and the random numbers that it has in one process.
3. What it made goes back the way that the rows came.

Backward goes the same ways. The gradients of a rank's experts are kept apart by micro-batch, and added by the tree.

Shapes: n rows, d features, k experts for each row, p pairs of a group.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lockstep.comm.canonical import move
from lockstep.comm.carrier import Carrier
from lockstep.device.meta import has_values
from lockstep.errors import UsageError
from lockstep.parallel.linear_map import linear_map
from lockstep.parallel.tensor.chunks import Draws, Region
from lockstep.parallel.tensor.layers import align, by_chunk, calling_with, copies


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

    Another `make` may be put in the place of this rank's own work for the groups in `chunks.own` (Dispatch).
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


Gradients = dict[str, Tensor]  # by the names of a module's parameters


@final
class Dispatch:
    """What makes a module's groups of experts work where they are: rank r of `ranks` has the r-th part of them."""

    def __init__(self, experts: Experts, rank: int, ranks: int, carrier: Carrier) -> None:
        self._experts = experts
        self._rank = rank
        self.ranks = ranks
        self._carrier = carrier
        self._own = experts.chunks.count // ranks
        # What a round's backward has made for each rank's micro-batch. A module may be called several times.
        self._arrived: dict[int, Gradients] = {}

    def __call__(self, asked: Sequence[Pairs]) -> list[Tensor]:
        """See Make; `asked` has all groups."""
        draws = Draws()
        training = self._experts.module.training
        counts = [len(pairs.rows) for pairs in asked]
        arriving = self._announce(counts, draws.key if training else 0)
        out = [sum(counts[first : first + self._own]) for first in range(0, len(counts), self._own)]
        back = [sum(each[:-1]) for each in arriving]
        rows, weights = self._exchange_rows(
            out, back, [torch.cat([each.rows for each in asked]), torch.cat([each.weights for each in asked])]
        )
        [experts] = self.exchange(out, back, [torch.cat([each.experts for each in asked])])
        # By rank, and for each by group: in this order they arrive, and go back.
        lengths = [length for each in arriving for length in each[:-1]]
        parts = zip(_split(lengths, rows), torch.split(experts, lengths), _split(lengths, weights), strict=True)
        given = (Pairs(*each) for each in parts)
        names, own = self._experts.parameters.keys(), self._experts.parameters.values()
        of_sources = _BySource.apply(self, *own)
        made = []
        for source in range(self.ranks):
            parameters = of_sources[source * len(own) : (source + 1) * len(own)]
            groups = zip(*(each.tensor_split(self._own) for each in parameters), strict=True)
            for group, of_group in enumerate(groups, start=self._rank * self._own):
                if training:
                    draws.draw_by(arriving[source][-1], group)
                found = dict(zip(names, (align(each) for each in of_group), strict=True))
                made.append(self._experts.compute(found, next(given)))
        draws.go_on()
        [returned] = self._exchange_rows(back, out, [_join(made)])
        return list(_split(counts, returned))

    def exchange(self, out: Sequence[int], back: Sequence[int], tensors: Sequence[Tensor]) -> list[Tensor]:
        """Send each rank its part of each tensor, so many rows as in `out`, and return what comes, as many as `back`.

        What a rank has for itself it keeps.
        """
        arriving = [each.new_empty(sum(back), *each.shape[1:]) for each in tensors]
        sent, received = [], []
        for tensor, whole in zip(tensors, arriving, strict=True):
            parts = zip(torch.split(tensor.contiguous(), [*out]), torch.split(whole, [*back]), strict=True)
            for rank, (given, taken) in enumerate(parts):
                if rank == self._rank:
                    taken.copy_(given)
                else:
                    sent.append((given, rank))
                    received.append((taken, rank))
        move(self._carrier, sent, received)
        return arriving

    def _exchange_rows(self, out: Sequence[int], back: Sequence[int], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return what `exchange` does; its backward is the exchange the other way."""
        return linear_map(partial(self.exchange, out, back), partial(self.exchange, back, out), tensors)

    def receive(self, source: int, gradients: Sequence[Tensor | None]) -> None:
        """Take what a backward made for the parameters, for a micro-batch of the rank `source`."""
        arrived = self._arrived.setdefault(source, {})
        for name, gradient in zip(self._experts.parameters, gradients, strict=True):
            if gradient is not None:
                arrived[name] = arrived[name] + gradient if name in arrived else gradient

    def take(self) -> Mapping[int, Gradients]:
        """Return what was received in a round, by rank, and forget it."""
        arrived, self._arrived = self._arrived, {}
        return arrived

    def _announce(self, counts: Sequence[int], key: int) -> list[list[int]]:
        """Tell each rank how many rows each of its groups will get, and the key; return what each rank tells."""
        device = next(iter(self._experts.parameters.values())).device
        told = [[*counts[rank * self._own : (rank + 1) * self._own], key] for rank in range(self.ranks)]
        [heard] = self.exchange([1] * self.ranks, [1] * self.ranks, [torch.tensor(told, device=device)])
        found: list[list[int]] = heard.tolist()
        return found


class _BySource(torch.autograd.Function):
    """The parameters once for each rank; their gradients are handed over, and never added up here."""

    @staticmethod
    def forward(ctx: Any, dispatch: Dispatch, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.dispatch, ctx.count = dispatch, len(parameters)
        ctx.set_materialize_grads(False)
        return tuple(each.detach() for _ in range(dispatch.ranks) for each in parameters)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        for source in range(ctx.dispatch.ranks):
            ctx.dispatch.receive(source, gradients[source * ctx.count : (source + 1) * ctx.count])
        return None, *([None] * ctx.count)


def _split(lengths: Sequence[int], tensor: Tensor) -> tuple[Tensor, ...]:
    """Return parts of a tensor, each as it is in a process that has it alone (layers.py, align)."""
    return linear_map(partial(_parts, lengths), _cat, [tensor])


def _join(parts: Sequence[Tensor]) -> Tensor:
    """Return parts one behind the other; the gradient of each is as it is in a process that has it alone."""
    [whole] = linear_map(_cat, partial(_parts, [len(each) for each in parts]), parts)
    return whole


def _parts(lengths: Sequence[int], tensors: Sequence[Tensor]) -> list[Tensor]:
    [whole] = tensors
    return [each.clone() for each in torch.split(whole, [*lengths])]


def _cat(parts: Sequence[Tensor]) -> list[Tensor]:
    return [torch.cat([*parts])]
