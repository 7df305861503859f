"""Mixture of experts: the chunks of an expert module are groups of experts.

Shazeer et al. 2017, "Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts Layer". The inputs of an
expert module are rows of features and, for each row, the indices and the weights of the experts that a gate chose. The
unit of computation is a call of the module's own code for a *group* of experts. Its inputs are only the pairs of a row
and an expert of the group, in the order of the rows. Therefore the call has the same shape and the same order on any
rank. The tree (chunks.py) adds up the outputs of the groups, and the gradients of the rows and weights.

With expert parallelism, each rank has different micro-batches and some groups of the experts: Lepikhin et al. 2021,
"GShard: Scaling Giant Models with Conditional Computation and Automatic Sharding" (ICLR). In a call of the module, all
ranks run these phases together:

1. Each rank sends its rows to the ranks that have the chosen experts, with the indices and the weights of the experts.
2. Each rank calls its groups, separately for the rows of each source rank, i.e. of each micro-batch. Therefore a call
   has the same shape, order and random numbers as in a single process.
3. Each rank sends the outputs back to the source ranks.

Backward takes the same route in reverse. Each rank keeps the gradients of its experts separate by micro-batch, and the
tree adds them up.

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
    """The inputs of a group: `rows` [p, d], `experts` [p] as indices in the group, and `weights` [p]."""

    rows: Tensor
    experts: Tensor
    weights: Tensor


# Maps the pairs of several groups to the outputs of these groups, [p, d] for each group.
Make = Callable[[Sequence[Pairs]], Sequence[Tensor]]


def takes_pairs(module: nn.Module) -> bool:
    """Return whether the module's forward has three arguments: rows, expert indices and weights."""
    return len(inspect.signature(module.forward).parameters) == 3


@final
class Experts:
    """Replaces the forward of `module`. Its parameters must have one row of dim 0 for each expert.

    By default, this rank computes the groups in `chunks.own`. To dispatch rows to other ranks, replace `make` (see
    Dispatch).
    """

    def __init__(self, module: nn.Module, chunks: Region, of_group: int) -> None:
        """`of_group` is the number of experts that the module's own code computes with."""
        self.module = module
        self.chunks = chunks
        self.make: Make = self._make
        self._forward: Callable[..., Tensor] = module.forward
        self._of_group = of_group

    def __call__(self, rows: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Return the outputs [n, d] of `experts` [n, k] for `rows` [n, d], weighted by `weights` [n, k]."""
        if rows.ndim != 2 or experts.ndim != 2:
            raise UsageError(
                f"recipe.model.plan: {self.chunks.name} is experts, but was called with rows of shape {[*rows.shape]} "
                f"and expert indices of shape {[*experts.shape]}; pass shapes [n, d] and [n, k]"
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
        """This rank's part of the module's parameters."""
        return dict(self.module.named_parameters(recurse=False))

    def compute(self, parameters: Mapping[str, Tensor], pairs: Pairs) -> Tensor:
        """Return the outputs [p, d] of the group with these parameters for its pairs."""
        rows, experts, weights = pairs
        if not len(rows):  # keep the graph to rows and weights, so that all ranks do the same in backward
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
    """Return the indices of the pairs whose `relative` expert index is in [0, count)."""
    if not has_values(relative):  # without values, only shapes matter: select all pairs
        return torch.arange(len(relative), device=relative.device)
    return ((relative >= 0) & (relative < count)).nonzero().squeeze(1)


def _repeat(count: int, gradients: Sequence[Tensor]) -> list[Tensor]:
    return [*gradients] * count


Gradients = dict[str, Tensor]  # by the names of a module's parameters


@final
class Dispatch:
    """Dispatches rows to the ranks that have the experts. Rank r of `ranks` has the r-th part of the groups."""

    def __init__(self, experts: Experts, rank: int, ranks: int, carrier: Carrier) -> None:
        self._experts = experts
        self._rank = rank
        self.ranks = ranks
        self._carrier = carrier
        self._own = experts.chunks.count // ranks
        # Gradients of the current round by source rank. They accumulate, because a module can be called several times.
        self._arrived: dict[int, Gradients] = {}

    def __call__(self, asked: Sequence[Pairs]) -> list[Tensor]:
        """See Make. `asked` has the pairs of all groups of all ranks."""
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
        # Rows arrive and go back in the order of source ranks, and of groups for each source rank.
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
        """Send `out[r]` rows of each tensor to rank r, and return the received tensors with `back[r]` rows from rank r.

        Rows for this rank itself are copied.
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
        """Return the result of `exchange`. Its backward exchanges the gradients in the opposite direction."""
        return linear_map(partial(self.exchange, out, back), partial(self.exchange, back, out), tensors)

    def receive(self, source: int, gradients: Sequence[Tensor | None]) -> None:
        """Add the gradients of the parameters for the micro-batch of rank `source`."""
        arrived = self._arrived.setdefault(source, {})
        for name, gradient in zip(self._experts.parameters, gradients, strict=True):
            if gradient is not None:
                arrived[name] = arrived[name] + gradient if name in arrived else gradient

    def take(self) -> Mapping[int, Gradients]:
        """Return the gradients of a round by source rank, and clear them."""
        arrived, self._arrived = self._arrived, {}
        return arrived

    def _announce(self, counts: Sequence[int], key: int) -> list[list[int]]:
        """Send each rank the numbers of rows for its groups, and the key. Return the numbers and keys of all ranks."""
        device = next(iter(self._experts.parameters.values())).device
        told = [[*counts[rank * self._own : (rank + 1) * self._own], key] for rank in range(self.ranks)]
        [heard] = self.exchange([1] * self.ranks, [1] * self.ranks, [torch.tensor(told, device=device)])
        found: list[list[int]] = heard.tolist()
        return found


class _BySource(torch.autograd.Function):
    """Returns the parameters once for each rank. Passes their gradients to the Dispatch instead of adding them up."""

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
    """Split a tensor into parts with separate memory, as in a process that has only this part (layers.py, align)."""
    return linear_map(partial(_parts, lengths), _cat, [tensor])


def _join(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate parts. In backward, the gradient of each part has separate memory."""
    [whole] = linear_map(_cat, partial(_parts, [len(each) for each in parts]), parts)
    return whole


def _parts(lengths: Sequence[int], tensors: Sequence[Tensor]) -> list[Tensor]:
    [whole] = tensors
    return [each.clone() for each in torch.split(whole, [*lengths])]


def _cat(parts: Sequence[Tensor]) -> list[Tensor]:
    return [torch.cat([*parts])]
