"""A layout for optimizers that can't update rows: each tensor has an owner rank, which updates the full tensor.

Some optimizers compute different results for rows than for the full tensor: Muon orthogonalizes matrices, Adafactor and
Shampoo reduce over rows and columns, and fused kernels compute different bits at the end of a tensor. This layout wraps
a layout that shards tensors by rows. A step has these phases:

1. `collect`: The inner layout has this rank's rows of the gradient sums. Each rank sends its rows of every tensor to
   the owner of the tensor, which assembles the full gradient.
2. The owner updates the full tensor. Only the owner has the optimizer state of the tensor, so optimizer memory is still
   sharded. All other ranks have an empty placeholder without a gradient, which optimizers skip.
3. `publish`: The owner sends the updated rows to all ranks that hold them.

Owners are assigned from the largest tensor to the smallest. The owner of each tensor is the rank that owns the fewest
elements so far. This balances optimizers whose time is proportional to the number of elements.

In addition to its rows, a rank keeps a full copy of the tensors that it owns: R * C / W elements for W ranks.

If a recipe splits a model into chunks, the rows of a tensor are in the order of its chunks. For such an optimizer, this
is a different matrix. Therefore, before the update, the owner restores the tensor as it would be in the model without
chunks. For the same reason, each chunked tensor has an owner even if the strategy replicates it.

Shapes: a tensor p_RC has R rows on its owner, and p_rC is a rank's part of the rows.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.comm.world import World
from lockstep.core.shard import ChunkLayout, MaybeSharded, Shard
from lockstep.parallel.layouts.base import HasRowSpans, Layout, OptimizerStateLayout, RowSpan, make_sharded_norms
from lockstep.parallel.offloaded import group_by_size
from lockstep.parallel.optimizer_state import NamedParameter
from lockstep.parallel.optimizer_step import get_gradient
from lockstep.parallel.pipeline.state import OptimizerNames

_MAX_GROUP_BYTES: Final = 32 << 20  # maximum total size of tensors whose rows are sent together


@dataclass(eq=False)
class _OwnedTensor:
    """A tensor whose rows are on several ranks. `full` is the full tensor on the owner, and empty on all other ranks.

    `spans` contains the rows of each rank in a tensor of shape `row_shape`. If the tensor is `chunked`, these are the
    rows of its chunks, and `full` has the shape that the tensor has in the model without chunks.
    """

    name: str
    owner: int
    spans: Sequence[RowSpan]
    rows: nn.Parameter
    row_shape: torch.Size
    stride: tuple[int, ...]
    chunked: ChunkLayout | None
    full: nn.Parameter = field(init=False)

    @property
    def shape(self) -> torch.Size:
        """The shape of the tensor in the model without chunks."""
        return self.row_shape if self.chunked is None else torch.Size(self.chunked.shape)

    @property
    def nbytes(self) -> int:
        return self.row_shape.numel() * self.rows.element_size()

    def allocate(self, dtype: torch.dtype, is_owned: bool) -> Tensor:
        """Allocate the full tensor without initializing it, or a tensor without rows if this rank doesn't own it.

        The strides of the full tensor are the same as in a single process.
        """
        device = self.rows.device
        if not is_owned:
            return torch.empty((0, *self.shape[1:]), dtype=dtype, device=device)
        if self.chunked is not None:
            return torch.empty(self.shape, dtype=dtype, device=device)
        return torch.empty_strided(self.shape, self.stride, dtype=dtype, device=device)

    def to_rows(self, tensor: Tensor) -> Tensor:
        """Convert a tensor with the shape of `full` to rows of shape `row_shape`. Copies if the order changes."""
        if self.chunked is None:
            return tensor
        return self.chunked.to_rows(tensor) if len(tensor) else tensor.new_empty((0, *self.row_shape[1:]))

    def from_rows(self, rows: Tensor) -> Tensor:
        """Convert rows of shape `row_shape` to a tensor with the shape of `full`."""
        return rows if self.chunked is None else self.chunked.from_rows(rows)

    def find_source_spans(self) -> Sequence[RowSpan]:
        """Return the spans that the owner gathers. They cover each row once, and prefer the owner's own rows."""
        spans: dict[tuple[int, int], RowSpan] = {}
        for span in self.spans:
            rows = span.first, span.num_rows
            if span.num_rows and (span.rank == self.owner or (span.primary and rows not in spans)):
                spans[rows] = span
        return list(spans.values())


@final
class OwnedLayout:
    """Wraps the layout `inner_layout`, so that each sharded or chunked tensor is updated by the rank that owns it.

    `strides` maps parameter names to the strides of the full parameters. `chunk_layouts` contains the parameters that
    the recipe splits into chunks.
    """

    def __init__(
        self,
        inner_layout: Layout,
        world: World,
        strides: Mapping[str, tuple[int, ...]],
        chunk_layouts: Mapping[str, ChunkLayout] = MappingProxyType({}),
    ) -> None:
        self._inner = inner_layout
        self._world = world
        shapes = {name: inner_layout.as_shard(name, rows.detach()).shape for name, rows in inner_layout.trained}
        spans = {name: self._find_spans(name, shape, name in chunk_layouts) for name, shape in shapes.items()}
        owners = _assign_owners(shapes, {name: spans[name] for name in shapes if spans[name]}, world.size)
        self._tensors = [
            _OwnedTensor(name, owners[name], spans[name], rows, shapes[name], strides[name], chunk_layouts.get(name))
            for name, rows in inner_layout.trained
            if name in owners
        ]
        for tensor in self._tensors:
            tensor.full = nn.Parameter(tensor.allocate(tensor.rows.dtype, self._owns(tensor)))
        full_by_name = {tensor.name: tensor.full for tensor in self._tensors}
        self.trained: Sequence[NamedParameter] = [
            (name, full_by_name.get(name, rows)) for name, rows in inner_layout.trained
        ]
        self._by_name = {tensor.name: tensor for tensor in self._tensors}
        shards = {
            tensor.name: Shard(tensor.full.detach(), 0, tensor.shape, self._owns(tensor)) for tensor in self._tensors
        }
        parts: dict[Tensor, Shard] = {
            parameter: shards.get(name) or Shard(parameter.detach(), 0, parameter.shape, world.rank == 0)
            for name, parameter in self.trained
        }
        self.norms = make_sharded_norms(world, parts)
        self._gather_weights()

    @property
    def placeholders(self) -> Sequence[Tensor]:
        """The empty placeholders for tensors that other ranks own."""
        return [tensor.full for tensor in self._tensors if tensor.owner != self._world.rank]

    def as_shard(self, name: str, tensor: Tensor) -> MaybeSharded:
        """See Layout."""
        if name not in self._by_name:
            return self._inner.as_shard(name, tensor)
        owned = self._by_name[name]
        return Shard(owned.to_rows(tensor), 0, owned.row_shape, self._owns(owned))

    def state(self) -> dict[str, MaybeSharded]:
        """See Layout."""
        return self._inner.state()

    @torch.no_grad()
    def collect(self) -> None:
        """See Layout. Gathers the rows of each gradient sum on the owner of the tensor."""
        self._inner.collect()
        for group in self._group_tensors():
            gradients = {tensor.name: get_gradient(tensor.rows) for tensor in group}
            for tensor in group:
                tensor.rows.grad = None
                tensor.full.grad = tensor.allocate(gradients[tensor.name].dtype, self._owns(tensor))
            self._gather(group, gradients, lambda tensor: get_gradient(tensor.full))

    @torch.no_grad()
    def publish(self) -> None:
        """See Layout. Scatters the updated tensors from their owners to the ranks that hold the rows."""
        for group in self._group_tensors():
            self._scatter(group)
        self._inner.publish()

    @torch.no_grad()
    def reload(self) -> None:
        """See Layout."""
        self._inner.reload()
        self._gather_weights()

    def get_optimizer_state(
        self, slots: OptimizerStateLayout, optimizer: Optimizer
    ) -> tuple[dict[str, MaybeSharded], dict[str, Any]]:
        """Return the optimizer state: the tensors as shards, whose rows are all on the owner, and the scalars.

        `slots` is the layout of this rank's optimizer state. All ranks must call this method.
        """
        self._drop_unowned_state(optimizer)  # some optimizers create their state before the first step
        return OptimizerNames(self.trained, optimizer).state(self._world, slots, optimizer, primary=True)

    def load_optimizer_state(
        self,
        slots: OptimizerStateLayout,
        optimizer: Optimizer,
        tensors: Mapping[str, Tensor],
        scalars: Mapping[str, Any],
    ) -> None:
        """Load this rank's optimizer state from the full optimizer state of a checkpoint."""
        tensors = {name: self._convert_slot_from_rows(name, tensor) for name, tensor in tensors.items()}
        OptimizerNames(self.trained, optimizer).load(slots, optimizer, tensors, scalars)
        self._drop_unowned_state(optimizer)

    def _drop_unowned_state(self, optimizer: Optimizer) -> None:
        for placeholder in self.placeholders:
            optimizer.state.pop(placeholder, None)

    def _convert_slot_from_rows(self, name: str, tensor: Tensor) -> Tensor:
        """Convert the tensor in slot `name` of a checkpoint to the shape that the owner's optimizer uses."""
        owned = self._by_name.get(name.rpartition("/")[0])
        return owned.from_rows(tensor) if owned is not None and tensor.shape == owned.row_shape else tensor

    def _find_spans(self, name: str, shape: torch.Size, is_chunked: bool) -> Sequence[RowSpan]:
        """Return the rows of a tensor on each rank, or an empty sequence if the tensor has no owner."""
        spans = self._inner.spans(name, shape) if isinstance(self._inner, HasRowSpans) else ()
        if spans or not is_chunked:
            return spans
        return [RowSpan(rank, 0, shape[0], primary=rank == 0) for rank in range(self._world.size)]

    def _owns(self, tensor: _OwnedTensor) -> bool:
        return tensor.owner == self._world.rank

    def _group_tensors(self) -> Iterable[list[_OwnedTensor]]:
        return group_by_size(((tensor, tensor.nbytes) for tensor in self._tensors), _MAX_GROUP_BYTES)

    @torch.no_grad()
    def _gather_weights(self) -> None:
        for group in self._group_tensors():
            self._gather(group, {tensor.name: tensor.rows.detach() for tensor in group}, lambda tensor: tensor.full)

    def _gather(
        self,
        tensors: Sequence[_OwnedTensor],
        rows: Mapping[str, Tensor],
        get_full_tensor: Callable[[_OwnedTensor], Tensor],
    ) -> None:
        """Gather `rows`, this rank's rows by tensor name, into the owners' tensors, which `get_full_tensor` returns."""
        sent, received = _Messages(), _Messages()
        chunked_rows: dict[str, Tensor] = {}
        for tensor in tensors:
            target = get_full_tensor(tensor)
            if tensor.chunked is not None and self._owns(tensor):
                target = chunked_rows[tensor.name] = target.new_empty(tensor.row_shape)
            for span in tensor.find_source_spans():
                if span.rank == self._world.rank:
                    sent.add(tensor.owner, rows[tensor.name])
                if self._owns(tensor):
                    received.add(span.rank, target[span.first : span.first + span.num_rows])
        self._exchange(sent, received)
        for tensor in tensors:
            if tensor.name in chunked_rows:
                get_full_tensor(tensor).copy_(tensor.from_rows(chunked_rows[tensor.name]))

    def _scatter(self, group: Sequence[_OwnedTensor]) -> None:
        """Scatter the full tensors in `group` from their owners to the ranks that hold the rows."""
        sent, received = _Messages(), _Messages()
        for tensor in group:
            rows = tensor.to_rows(tensor.full.detach())
            for span in tensor.spans:
                if not span.num_rows:
                    continue
                if self._owns(tensor):
                    sent.add(span.rank, rows[span.first : span.first + span.num_rows])
                if span.rank == self._world.rank:
                    received.add(tensor.owner, tensor.rows.detach())
        self._exchange(sent, received)

    def _exchange(self, sent: "_Messages", received: "_Messages") -> None:
        """Send and receive messages. Tensors between the same two ranks are packed into one message per dtype."""
        own_rank = self._world.rank
        device = self._world.device  # rows can be in CPU memory, which NCCL can't send
        outgoing = [
            (torch.cat([each.reshape(-1) for each in tensors]).to(device), rank)
            for rank, tensors in sent.get_peer_messages(own_rank)
        ]
        incoming = [
            (torch.empty(sum(each.numel() for each in tensors), dtype=tensors[0].dtype, device=device), rank)
            for rank, tensors in received.get_peer_messages(own_rank)
        ]
        self._world.exchange(outgoing, incoming)
        for (buffer, _), (_, tensors) in zip(incoming, received.get_peer_messages(own_rank), strict=True):
            parts = torch.split(buffer, [each.numel() for each in tensors])
            torch._foreach_copy_(tensors, [part.view(each.shape) for part, each in zip(parts, tensors, strict=True)])
        for target, source in zip(received.for_rank(own_rank), sent.for_rank(own_rank), strict=True):
            target.copy_(source)


@final
class _Messages:
    """Tensors to send or receive, by peer rank and dtype, in the order in which they were added."""

    def __init__(self) -> None:
        self._tensors: dict[tuple[int, torch.dtype], list[Tensor]] = {}

    def add(self, rank: int, tensor: Tensor) -> None:
        self._tensors.setdefault((rank, tensor.dtype), []).append(tensor)

    def for_rank(self, rank: int) -> list[Tensor]:
        """Return the tensors for rank `rank`."""
        return [each for (peer, _), tensors in self._tensors.items() if peer == rank for each in tensors]

    def get_peer_messages(self, own_rank: int) -> list[tuple[int, list[Tensor]]]:
        return [(rank, tensors) for (rank, _), tensors in self._tensors.items() if rank != own_rank]


def _assign_owners(
    shapes: Mapping[str, torch.Size], spans: Mapping[str, Sequence[RowSpan]], num_ranks: int
) -> dict[str, int]:
    """Return the owner of each tensor in `spans`. A single rank that has all rows, e.g. a server, is the owner."""
    loads = [0] * num_ranks
    owners = {}
    for name in sorted(spans, key=lambda name: -shapes[name].numel()):  # stable: ties keep the model order
        holders = [span.rank for span in spans[name] if span.num_rows]
        owners[name] = holders[0] if len(holders) == 1 else loads.index(min(loads))
        loads[owners[name]] += shapes[name].numel()
    return owners
