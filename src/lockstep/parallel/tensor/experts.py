"""Mixture of experts: the chunks of an expert module are groups of experts.

Shazeer et al. 2017, "Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts Layer". The inputs of an
expert module are rows of features and, for each row, the indices and weights of the experts that a gate selected. The
module's own code is called once for each *group* of experts. The inputs of a call are all pairs of a row and an expert
of the group, in row order. Therefore the call has the same shape and order on any rank. The reduction tree (chunks.py)
sums the outputs of the groups, and the gradients of the rows and weights.

With expert parallelism, each rank has different micro-batches and a part of the groups (Lepikhin et al. 2021, "GShard:
Scaling Giant Models with Conditional Computation and Automatic Sharding", ICLR). All ranks call the module at the same
time, in three phases:

1. Each rank sends its rows, with the indices and weights of the selected experts, to the ranks that hold the experts.
2. Each rank calls each of its groups once for every source rank. Therefore a call only has rows of one micro-batch,
   and the same shape, order and random numbers as in a single process.
3. Each rank sends the outputs back to the source ranks.

The backward pass reverses these phases. Each rank keeps a separate gradient of its experts for each micro-batch, and
the reduction tree sums these gradients.

Shapes: n rows, d features, k experts for each row, p pairs of a row and an expert of a group.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lockstep.comm.canonical import transfer_tensors
from lockstep.comm.carrier import Carrier
from lockstep.device.meta import has_values
from lockstep.errors import UsageError
from lockstep.parallel.linear_map import apply_linear_map
from lockstep.parallel.tensor.chunks import ChunkRng, Region
from lockstep.parallel.tensor.layers import align, copy_for_chunks, replace_parameters, split_by_chunk


class RoutedRows(NamedTuple):
    """The inputs of a group of experts: `rows` [p, d], `experts` [p] (indices within the group) and `weights` [p]."""

    rows: Tensor
    experts: Tensor
    weights: Tensor


# Computes the outputs [p, d] of each of several groups of experts.
ComputeGroups = Callable[[Sequence[RoutedRows]], Sequence[Tensor]]


def takes_routed_rows(module: nn.Module) -> bool:
    """Return whether a module's forward method takes three arguments, such as rows, expert indices and weights."""
    return len(inspect.signature(module.forward).parameters) == 3


@final
class Experts:
    """Replaces the forward method of an expert module, whose parameters must have one row of dim 0 for each expert.

    By default, this rank computes the groups in `region.local_chunks`. To dispatch rows to other ranks, set
    `compute_groups` to a Dispatcher.
    """

    def __init__(self, module: nn.Module, region: Region, group_size: int) -> None:
        """Create a forward method that calls the original one with groups of `group_size` experts."""
        self.module = module
        self.region = region
        self.compute_groups: ComputeGroups = self._compute_groups
        self._forward: Callable[..., Tensor] = module.forward
        self._group_size = group_size

    def __call__(self, rows: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Return the sum of the outputs of `experts` [n, k] for `rows` [n, d], weighted by `weights` [n, k]: [n, d]."""
        if rows.ndim != 2 or experts.ndim != 2:
            raise UsageError(
                f"recipe.model.plan: {self.region.name} is set to experts, but was called with rows of shape "
                f"{[*rows.shape]} and expert indices of shape {[*experts.shape]}; pass shapes [n, d] and [n, k]"
            )
        inputs = copy_for_chunks(self.region, [rows, weights.reshape(-1)])
        pairs_by_group, row_indices = [], []
        for index, group in enumerate(self.region.local_chunks):
            relative = experts.reshape(-1) - group * self._group_size
            pairs = _find_group_indices(relative, self._group_size)
            row_indices.append(pairs // experts.shape[-1])
            pairs_by_group.append(
                RoutedRows(
                    inputs[2 * index].index_select(0, row_indices[-1]), relative[pairs], inputs[2 * index + 1][pairs]
                )
            )
        outputs = zip(row_indices, self.compute_groups(pairs_by_group), strict=True)
        group_outputs = [torch.zeros_like(rows).index_add(0, *output) for output in outputs]
        [total] = apply_linear_map(
            lambda tensors: [self.region.sum_chunks(tensors)],
            partial(_repeat_gradients, len(group_outputs)),
            group_outputs,
        )
        return total

    @property
    def local_parameters(self) -> dict[str, Tensor]:
        """The module's own parameters by name. They only contain this rank's experts."""
        return dict(self.module.named_parameters(recurse=False))

    def compute_group(self, parameters: Mapping[str, Tensor], routed_rows: RoutedRows) -> Tensor:
        """Return the outputs [p, d] of a group of experts with these `local_parameters`."""
        rows, experts, weights = routed_rows
        if not len(rows):  # keep rows and weights in the graph, so that the backward pass is the same on all ranks
            return rows * weights[:, None]
        with replace_parameters(self.module, {**self.module._parameters, **parameters}):
            return self._forward(rows, experts[:, None], weights[:, None]).to(rows.dtype)

    def _compute_groups(self, rows_by_group: Sequence[RoutedRows]) -> list[Tensor]:
        group_parameters = {
            name: split_by_chunk(parameter, self.region) for name, parameter in self.local_parameters.items()
        }
        outputs = []
        for index, _ in self.region.iterate_chunks(self.module.training):
            outputs.append(
                self.compute_group(
                    {name: parameter[index] for name, parameter in group_parameters.items()}, rows_by_group[index]
                )
            )
        return outputs


def _find_group_indices(relative_experts: Tensor, group_size: int) -> Tensor:
    """Return the positions in `relative_experts` of the group's own experts: the values in [0, group_size)."""
    if not has_values(relative_experts):  # on the meta device, only the shapes matter, so select all pairs
        return torch.arange(len(relative_experts), device=relative_experts.device)
    return ((relative_experts >= 0) & (relative_experts < group_size)).nonzero().squeeze(1)


def _repeat_gradients(num_groups: int, gradients: Sequence[Tensor]) -> list[Tensor]:
    return [*gradients] * num_groups


NamedGradients = dict[str, Tensor]  # by parameter name


@final
class Dispatcher:
    """Dispatches rows to the ranks with their experts. Each of the `num_ranks` ranks holds consecutive groups."""

    def __init__(self, experts: Experts, rank: int, num_ranks: int, carrier: Carrier) -> None:
        self._experts = experts
        self._rank = rank
        self.ranks = num_ranks
        self._carrier = carrier
        self._local_count = experts.region.num_chunks // num_ranks
        # Parameter gradients of the current round by source rank, accumulated over all calls of the module.
        self._gradients_by_source: dict[int, NamedGradients] = {}

    def __call__(self, rows_by_group: Sequence[RoutedRows]) -> list[Tensor]:
        """Return the outputs of all groups on all ranks for this rank's rows. `rows_by_group` covers all groups."""
        rng = ChunkRng()
        training = self._experts.module.training
        counts = [len(pairs.rows) for pairs in rows_by_group]
        counts_by_source = self._exchange_counts(counts, rng.key if training else 0)
        sent_counts = [
            sum(counts[first : first + self._local_count]) for first in range(0, len(counts), self._local_count)
        ]
        received_counts = [sum(source_counts[:-1]) for source_counts in counts_by_source]
        rows, weights = self._exchange_rows(
            sent_counts,
            received_counts,
            [
                torch.cat([pairs.rows for pairs in rows_by_group]),
                torch.cat([pairs.weights for pairs in rows_by_group]),
            ],
        )
        [experts] = self.exchange(sent_counts, received_counts, [torch.cat([pairs.experts for pairs in rows_by_group])])
        # Rows arrive and return sorted by source rank, and then by group.
        lengths = [length for source_counts in counts_by_source for length in source_counts[:-1]]
        parts = zip(
            _split_rows(lengths, rows), torch.split(experts, lengths), _split_rows(lengths, weights), strict=True
        )
        received_pairs = (RoutedRows(*fields) for fields in parts)
        names, parameters = self._experts.local_parameters.keys(), self._experts.local_parameters.values()
        parameters_by_source = _GradientsBySource.apply(self, *parameters)
        outputs = []
        for source in range(self.ranks):
            source_parameters = parameters_by_source[source * len(parameters) : (source + 1) * len(parameters)]
            groups = zip(*(parameter.tensor_split(self._local_count) for parameter in source_parameters), strict=True)
            for group, group_parameters in enumerate(groups, start=self._rank * self._local_count):
                if training:
                    rng.seed_chunk(counts_by_source[source][-1], group)
                named_parameters = dict(zip(names, (align(parameter) for parameter in group_parameters), strict=True))
                outputs.append(self._experts.compute_group(named_parameters, next(received_pairs)))
        rng.resume()
        [rows_back] = self._exchange_rows(received_counts, sent_counts, [_join_rows(outputs)])
        return list(_split_rows(counts, rows_back))

    def exchange(
        self, sent_counts: Sequence[int], received_counts: Sequence[int], tensors: Sequence[Tensor]
    ) -> list[Tensor]:
        """Send `sent_counts[r]` rows of each tensor to each rank r, and receive `received_counts[r]` rows from it.

        Returns the received rows of each tensor, in rank order. Rows that stay on this rank are copied.
        """
        results = [tensor.new_empty(sum(received_counts), *tensor.shape[1:]) for tensor in tensors]
        sent, received = [], []
        for tensor, received_tensor in zip(tensors, results, strict=True):
            parts = zip(
                torch.split(tensor.contiguous(), [*sent_counts]),
                torch.split(received_tensor, [*received_counts]),
                strict=True,
            )
            for rank, (outgoing, incoming) in enumerate(parts):
                if rank == self._rank:
                    incoming.copy_(outgoing)
                else:
                    sent.append((outgoing, rank))
                    received.append((incoming, rank))
        transfer_tensors(self._carrier, sent, received)
        return results

    def _exchange_rows(
        self, sent_counts: Sequence[int], received_counts: Sequence[int], tensors: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """Call `exchange`. In the backward pass, send the gradients in the opposite direction."""
        return apply_linear_map(
            partial(self.exchange, sent_counts, received_counts),
            partial(self.exchange, received_counts, sent_counts),
            tensors,
        )

    def accumulate_gradients(self, source_rank: int, gradients: Sequence[Tensor | None]) -> None:
        """Accumulate parameter gradients of rank `source_rank`'s micro-batch. A gradient can be None."""
        gradients_of_source = self._gradients_by_source.setdefault(source_rank, {})
        for name, gradient in zip(self._experts.local_parameters, gradients, strict=True):
            if gradient is not None:
                gradients_of_source[name] = (
                    gradients_of_source[name] + gradient if name in gradients_of_source else gradient
                )

    def pop_gradients(self) -> Mapping[int, NamedGradients]:
        """Return the parameter gradients of the current round by source rank, and clear them."""
        received, self._gradients_by_source = self._gradients_by_source, {}
        return received

    def _exchange_counts(self, counts: Sequence[int], rng_key: int) -> list[list[int]]:
        """Exchange the number of rows for each group, and the RNG keys.

        Returns a list for each source rank: the number of its rows for each group of this rank, followed by its key.
        """
        device = next(iter(self._experts.local_parameters.values())).device
        announcement = [
            [*counts[rank * self._local_count : (rank + 1) * self._local_count], rng_key] for rank in range(self.ranks)
        ]
        [answers] = self.exchange([1] * self.ranks, [1] * self.ranks, [torch.tensor(announcement, device=device)])
        counts_by_source: list[list[int]] = answers.tolist()
        return counts_by_source


class _GradientsBySource(torch.autograd.Function):
    """Returns one alias of each parameter per source rank. Passes the gradient of each alias to `dispatcher`."""

    @staticmethod
    def forward(ctx: Any, dispatcher: Dispatcher, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.dispatcher, ctx.count = dispatcher, len(parameters)
        ctx.set_materialize_grads(False)
        return tuple(parameter.detach() for _ in range(dispatcher.ranks) for parameter in parameters)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        for source in range(ctx.dispatcher.ranks):
            ctx.dispatcher.accumulate_gradients(source, gradients[source * ctx.count : (source + 1) * ctx.count])
        return None, *([None] * ctx.count)


def _split_rows(lengths: Sequence[int], tensor: Tensor) -> tuple[Tensor, ...]:
    """Split the rows of a tensor, and copy each part, so that its memory is aligned (see align in layers.py)."""
    return apply_linear_map(partial(_split_and_clone, lengths), _concatenate, [tensor])


def _join_rows(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate the rows of `parts`. In the backward pass, the gradient of each part has its own memory."""
    [joined] = apply_linear_map(_concatenate, partial(_split_and_clone, [len(part) for part in parts]), parts)
    return joined


def _split_and_clone(lengths: Sequence[int], tensors: Sequence[Tensor]) -> list[Tensor]:
    [joined] = tensors
    return [part.clone() for part in torch.split(joined, [*lengths])]


def _concatenate(parts: Sequence[Tensor]) -> list[Tensor]:
    return [torch.cat([*parts])]
