"""The layout for ZeRO stage 1: each rank has the full model, but updates only some rows of each tensor.

Rajbhandari et al. 2020, "ZeRO: Memory optimizations toward training trillion parameter models", section 5.1. Each rank
only keeps the optimizer state of its rows. After an update, the ranks all-gather the updated rows.

Shapes: a parameter p_R... has R rows. This rank updates p_r..., which is a view of the parameter, or a copy.
"""

from collections.abc import Sequence
from typing import Final, final

import torch
from torch import Tensor, nn

from lockstep.comm.stream import CommStream
from lockstep.comm.world import World
from lockstep.core.mesh import Mesh
from lockstep.core.order import get_subrange
from lockstep.core.shard import MaybeSharded, Shard, shard_like
from lockstep.device.memory import empty_host_tensor
from lockstep.parallel.gradients import BucketedGradientSum
from lockstep.parallel.layouts.base import (
    GradientSum,
    Layout,
    MakeLayout,
    RowSpan,
    get_trainable_parameters,
    make_sharded_norms,
)
from lockstep.parallel.weights import ReplicatedLayout

# Pack smaller parameters, because sending a message takes as long as copying this many bytes.
_MIN_UNPACKED_BYTES: Final = 64 << 10


def make_row_layout(world: World, mesh: Mesh, bucket_bytes: int, offload: bool, num_chunks: int = 1) -> MakeLayout:
    """Return a function that creates the layout, in which each rank updates an equal share of the rows.

    If `offload` is set, these rows and their optimizer state are in CPU memory (parallel/offloaded.py). `num_chunks` is
    the number of chunks that sequences are split into.
    """

    def make_layout(model: nn.Module, stream: CommStream, dtype: torch.dtype | None) -> tuple[Layout, GradientSum]:
        canonical = world.make_canonical_sum(mesh, "replicate", num_chunks=num_chunks)
        gradients = BucketedGradientSum(
            get_trainable_parameters(model), canonical, stream, world.size == 1, bucket_bytes
        )
        return RowLayout(model, world, offload, dtype), gradients

    return make_layout


@final
class RowLayout:
    """A layout that splits the rows of each parameter evenly over the ranks, in rank order.

    Every rank updates 0-dim parameters. If `dtype` is set, the model computes with weight copies in this dtype. Each
    rank then has the full copies, and the master weights are sharded by rows.
    """

    def __init__(self, model: nn.Module, world: World, offload: bool, dtype: torch.dtype | None) -> None:
        self._model = model
        self._world = world
        self._parameters = get_trainable_parameters(model)
        self._weights = ReplicatedLayout(model, dtype)
        self._shards = {name: self._select_own_rows(parameter) for name, parameter in self._parameters}
        self._copies = dtype is not None
        self._offload = offload
        self._has_separate_memory = offload or self._copies  # whether trained rows aren't views of the model's weights
        self.trained = [
            (name, nn.Parameter(self._make_trained_rows(parameter))) for name, parameter in self._parameters
        ]
        self._weights.release_weights()
        parts: dict[Tensor, Shard] = {parameter: self._shards[name] for name, parameter in self.trained}
        self.norms = make_sharded_norms(world, parts)
        self._exchanges = self._make_exchanges()
        self._keeps_full_gradients = False
        self._sums: list[Tensor] = []  # the full gradient sums of a step in the order of `trained`, if they are kept

    def state(self) -> dict[str, MaybeSharded]:
        """See Layout."""
        if not self._copies:
            return {**self._model.state_dict()}
        pairs = zip(self._parameters, self.trained, strict=True)
        rows = {parameter: self.as_shard(name, rows_here.detach()) for (name, parameter), (_, rows_here) in pairs}
        states = self._weights.state()
        return {name: rows.get(value, states[name]) for name, value in self._model.state_dict(keep_vars=True).items()}

    def as_shard(self, name: str, tensor: Tensor) -> MaybeSharded:
        """See Layout."""
        return shard_like(tensor, self._shards[name]) if self._shards[name].shape else tensor

    @torch.no_grad()
    def reload(self) -> None:
        """See Layout."""
        if self._copies:
            self._weights.publish()
            self.publish()
        elif self._has_separate_memory:
            for name, trained in self.trained:
                trained.copy_(self._shards[name].tensor)

    def collect(self) -> None:
        """See Layout. Keeps this rank's rows of the gradients, and frees all other rows."""
        self._sums.clear()
        for (name, parameter), (_, rows) in zip(self._parameters, self.trained, strict=True):
            assert parameter.grad is not None
            shard = self._shards[name]
            gradient = parameter.grad[shard.first : shard.first + len(rows)] if shard.shape else parameter.grad
            rows.grad = self._copy_rows(gradient)
            if self._keeps_full_gradients:
                self._sums.append(parameter.grad)
            parameter.grad = None

    def spans(self, _name: str, shape: torch.Size) -> Sequence[RowSpan]:
        """See HasRowSpans."""
        size = self._world.size
        rows = [get_subrange(shape[0], size, rank) for rank in range(size)] if shape else []
        return [RowSpan(rank, rank_rows.start, len(rank_rows), primary=True) for rank, rank_rows in enumerate(rows)]

    def keep_full_gradients(self) -> None:
        """See ShardsGradientSums."""
        self._keeps_full_gradients = True

    def witnessed(self) -> Sequence[dict[str, MaybeSharded]]:
        """See ShardsGradientSums."""
        named_sums = [
            (name, gradient) for (name, _), gradient in zip(self.trained, self._sums, strict=True) if gradient.ndim
        ]
        ranks = (self._world.rank, (self._world.rank + 1) % self._world.size)
        return [{name: self._select_rows(gradient, rank) for name, gradient in named_sums} for rank in ranks]

    @torch.no_grad()
    def publish(self) -> None:
        """See Layout. All-gathers the updated rows."""
        self._sums.clear()
        if self._has_separate_memory:
            for name, trained in self.trained:
                self._shards[name].tensor.copy_(trained)
        for rows in self._exchanges:
            rows.exchange()

    def _select_own_rows(self, parameter: Tensor) -> Shard:
        if not parameter.ndim:
            return Shard(parameter.detach(), 0, parameter.shape, primary=self._world.rank == 0)
        return self._select_rows(parameter.detach(), self._world.rank)

    def _select_rows(self, tensor: Tensor, rank: int) -> Shard:
        rows = get_subrange(len(tensor), self._world.size, rank)
        return Shard(tensor[rows.start : rows.stop], rows.start, tensor.shape)

    def _make_trained_rows(self, parameter: nn.Parameter) -> Tensor:
        rows = self._select_own_rows(self._weights.get_master_weight(parameter)).tensor
        return self._copy_rows(rows) if self._has_separate_memory else rows

    def _copy_rows(self, rows: Tensor) -> Tensor:
        return empty_host_tensor(rows).copy_(rows) if self._offload else rows.clone()

    def _make_exchanges(self) -> "list[_RowExchange]":
        """Group the parameters. One exchange sends large rows without a copy, and one per dtype packs all others."""
        tensors_by_dtype: dict[torch.dtype | None, list[Tensor]] = {}
        for parameter in (parameter.detach() for _, parameter in self._parameters if parameter.ndim):
            # Permute all dims except the first to memory order. Contiguous rows can then be sent without a copy.
            dense = parameter.permute(0, *sorted(range(1, parameter.ndim), key=parameter.stride, reverse=True))
            is_dense = dense.is_contiguous() and parameter.nbytes >= _MIN_UNPACKED_BYTES
            tensors_by_dtype.setdefault(None if is_dense else parameter.dtype, []).append(
                dense if is_dense else parameter
            )
        ranks = range(self._world.size)
        return [
            _RowExchange(
                self._world, [[self._select_rows(p, rank).tensor for p in tensors] for rank in ranks], bool(dtype)
            )
            for dtype, tensors in tensors_by_dtype.items()
        ]


@final
class _RowExchange:
    """All-gathers the rows of several parameters.

    If `is_packed` is set, each rank's rows are sent as a single tensor.
    """

    def __init__(self, world: World, rows_by_rank: Sequence[Sequence[Tensor]], is_packed: bool) -> None:
        self._world = world
        self._own_rows = rows_by_rank[world.rank]
        self._peer_rows = {rank: rows for rank, rows in enumerate(rows_by_rank) if rank != world.rank}
        self._packed = is_packed

    def exchange(self) -> None:
        if not self._packed or not self._peer_rows:
            self._world.exchange_all(self._own_rows, self._peer_rows)
            return
        sizes = {rank: [rows.numel() for rows in tensors] for rank, tensors in self._peer_rows.items()}
        received = {rank: self._own_rows[0].new_empty(sum(numbers)) for rank, numbers in sizes.items()}
        packed = torch.cat([rows.reshape(-1) for rows in self._own_rows])
        self._world.exchange_all([packed], {rank: [tensor] for rank, tensor in received.items()})
        for rank, rows in self._peer_rows.items():
            pieces = torch.split(received[rank], sizes[rank])
            torch._foreach_copy_(list(rows), [piece.view(row.shape) for piece, row in zip(pieces, rows, strict=True)])
