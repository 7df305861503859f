"""The layout for a parameter server: all other ranks push gradients to rank 0 and pull weights from rank 0.

Li et al. 2014, "Scaling Distributed Machine Learning with the Parameter Server" (OSDI), with a single server on rank 0,
which also computes micro-batches. These phases of a step differ from data parallelism:

1. Each rank adds the gradients of its micro-batches as far as the reduction tree allows (core/tree.py). Workers *push*
   these partial sums to the server, one bucket at a time, as soon as the backward pass has filled the bucket. The
   server adds the partial sums of all ranks in the order of the tree, so the bits are the same as in a single process.
2. The server updates the weights. The optimizers of the workers have parameters without rows, so their steps are
   no-ops.
3. The workers *pull* the new weights. The server only replies after the update.

Shapes: the flat pieces of a bucket are g_N. For a parameter p_R..., the server has all R rows, and a worker has no
rows: p_0...
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from threading import Condition
from typing import final

import torch
from torch import Tensor, nn
from torch.futures import Future

from lockstep.comm.canonical import add_
from lockstep.comm.peer_errors import PeerLostError
from lockstep.comm.rpc import Rpc
from lockstep.comm.stream import CommStream
from lockstep.comm.world import World
from lockstep.core.shard import MaybeSharded, Shard, shard_like
from lockstep.core.tree import LeafBlock, sum_pieces
from lockstep.errors import UsageError
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

Pieces = Mapping[LeafBlock, Tensor]


def make_parameter_server_layout(world: World, server: "Server", rpc: Rpc, bucket_bytes: int) -> MakeLayout:
    """Return a function that creates the layout. Workers call the `server` on rank 0 through `rpc`."""

    def make_layout(model: nn.Module, stream: CommStream, dtype: torch.dtype | None) -> tuple[Layout, GradientSum]:
        layout = ParameterServerLayout(model, world, server, rpc, dtype)
        pushed_sum = ServerSum(world.rank == 0, server, rpc)
        return layout, BucketedGradientSum(
            get_trainable_parameters(model), pushed_sum, stream, single_process=False, bucket_bytes=bucket_bytes
        )

    return make_layout


@final
class Server:
    """The server on rank 0. Stores the partial sums that workers push, and the weights of the last update."""

    def __init__(self, num_ranks: int, timeout_s: float) -> None:
        self._workers = num_ranks - 1
        self._timeout_s = timeout_s
        self._condition = Condition()
        self._pushed: defaultdict[int, list[Pieces]] = defaultdict(list)
        self._weights: list[Tensor] = []
        self._updates = 0
        self._waiting: list[Future[list[Tensor]]] = []

    def push(self, number: int, pieces: Pieces) -> None:
        """Store the partial sums of a worker for sum `number`. Workers call this method over RPC."""
        with self._condition:
            self._pushed[number].append(pieces)
            self._condition.notify_all()

    def collect(self, number: int) -> list[Pieces]:
        """Wait until all workers have pushed their partial sums for sum `number`, and return these partial sums.

        Raises PeerLostError on timeout.
        """
        with self._condition:
            if not self._condition.wait_for(lambda: len(self._pushed[number]) == self._workers, self._timeout_s):
                missing = self._workers - len(self._pushed[number])
                raise PeerLostError(
                    f"got no gradient from {missing} of {self._workers} workers within {self._timeout_s:g} s"
                )
            return self._pushed.pop(number)

    def release(self, weights: list[Tensor]) -> None:
        """Make the weights of a new update available to the workers. Don't modify these tensors after the call."""
        with self._condition:
            self._weights = weights
            self._updates += 1
            futures, self._waiting = self._waiting, []
        for future in futures:
            future.set_result(weights)

    def pull(self, update: int) -> Future[list[Tensor]]:
        """Return a future for the weights after update number `update`. Workers call this method over RPC."""
        future: Future[list[Tensor]] = Future()
        with self._condition:
            if self._updates < update:
                self._waiting.append(future)
                return future
        future.set_result(self._weights)
        return future


@final
class ServerSum:
    """Adds up the partial sums of all ranks on the server. Workers push theirs, and get an uninitialized tensor."""

    def __init__(self, is_server: bool, server: Server, rpc: Rpc) -> None:
        self._is_server = is_server
        self._server = server
        self._rpc = rpc
        self._number = 0  # number of the current sum, which is the same on all ranks

    def __call__(self, pieces: Pieces, num_leaves: int, like: Tensor) -> Tensor:
        """See VectorSum."""
        self._number += 1
        if not self._is_server:
            self._rpc.call_server("push", self._number, {block: piece.cpu() for block, piece in pieces.items()})
            return like
        all_pieces = dict(pieces)
        for pushed in self._server.collect(self._number):
            all_pieces |= {block: piece.to(like.device) for block, piece in pushed.items()}
        return sum_pieces(all_pieces, num_leaves, add_)


@final
class ParameterServerLayout:
    """A layout in which each rank has the full model, but only rank 0, the server, updates the weights."""

    def __init__(self, model: nn.Module, world: World, server: Server, rpc: Rpc, dtype: torch.dtype | None) -> None:
        self._server = server
        self._rpc = rpc
        self._ranks = world.size
        self._is_server = world.rank == 0
        self._weights = ReplicatedLayout(model, dtype)
        self.state, self.reload = self._weights.state, self._weights.publish
        self._full_weights = self._weights.trained
        scalars = [name for name, weight in self._full_weights if not weight.ndim]
        if scalars:
            raise UsageError(
                f"strategy parameter_server: parameter {', '.join(scalars)} has no dims, so it cannot be sharded; use "
                f"shape (1,), or use strategy ddp"
            )
        rows = slice(None) if self._is_server else slice(0)
        self._shards = {
            name: Shard(weight.detach()[rows], 0, weight.shape, primary=self._is_server)
            for name, weight in self._full_weights
        }
        self.trained = (
            self._full_weights
            if self._is_server
            else [(name, nn.Parameter(self._shards[name].tensor)) for name, _ in self._full_weights]
        )
        self._updates = 0
        parts: dict[Tensor, Shard] = {parameter: self._shards[name] for name, parameter in self.trained}
        self.norms = make_sharded_norms(world, parts)

    def as_shard(self, name: str, tensor: Tensor) -> MaybeSharded:
        """See Layout."""
        return shard_like(tensor, self._shards[name])

    def spans(self, _name: str, shape: torch.Size) -> Sequence[RowSpan]:
        """See HasRowSpans."""
        return [RowSpan(rank, 0, 0 if rank else shape[0], primary=not rank) for rank in range(self._ranks)]

    def collect(self) -> None:
        """See Layout."""
        self._weights.collect()
        if not self._is_server:
            for (_, weight), (_, parameter) in zip(self._full_weights, self.trained, strict=True):
                weight.grad = None
                parameter.grad = torch.zeros_like(parameter)

    @torch.no_grad()
    def publish(self) -> None:
        """See Layout. The server releases the new weights, and workers pull them."""
        self._updates += 1
        weights = [weight.detach() for _, weight in self._full_weights]
        if self._is_server:
            # Release copies, because an evaluation can swap in the averaged weights before all workers have pulled.
            self._server.release([weight.to("cpu", copy=True) for weight in weights])
        else:
            torch._foreach_copy_(weights, self._rpc.call_server("pull", self._updates))
        self._weights.publish()
