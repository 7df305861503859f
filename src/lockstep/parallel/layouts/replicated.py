"""The layout of a model that each process has whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import Tensor, nn

from lockstep.comm.narrow_sum import NarrowSum
from lockstep.comm.stream import CommStream
from lockstep.comm.world import World
from lockstep.core.mesh import Mesh
from lockstep.core.norm import row_norms
from lockstep.core.shard import MaybeSharded
from lockstep.parallel.gradients import Gradients
from lockstep.parallel.layerwise import whole_norms
from lockstep.parallel.layouts.base import GradientSum, Layout, MakeLayout, trained_parameters
from lockstep.parallel.weights import Weights


def replicated(
    world: World, mesh: Mesh, bucket_bytes: int, sent: torch.dtype | None = None, chunks: int = 1
) -> MakeLayout:
    """Return what puts a model on each of the ranks, which add gradients in buckets of about `bucket_bytes`.

    With `sent` they are added over the ranks in that dtype. Sequences are cut into so many `chunks`.
    """

    def make(model: nn.Module, stream: CommStream, dtype: torch.dtype | None) -> tuple[Layout, GradientSum]:
        weights = Weights(model, dtype)  # first: it makes what gradients are added of
        canonical = world.canonical(mesh, "replicate", "context", chunks=chunks)
        among = canonical if sent is None else NarrowSum(canonical, mesh.data_rank(world.rank), sent)
        gradients = Gradients(trained_parameters(model), among, stream, world.size == 1, bucket_bytes)
        return ReplicatedLayout(weights), gradients

    return make


@final
class ReplicatedLayout:
    """Every rank has the whole model and does the whole update."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self.trained = weights.trained()

    def state(self) -> dict[str, MaybeSharded]:
        """See Layout."""
        return {**self._weights.state()}

    def held(self, name: str, tensor: Tensor) -> MaybeSharded:
        """See Layout."""
        return tensor

    def all_row_norms(self, tensors: Sequence[Tensor]) -> Tensor:
        """See Layout."""
        return torch.cat([row_norms(tensor) for tensor in tensors])

    def norms(self, tensors: Mapping[Tensor, Tensor]) -> Tensor:
        """See Layout."""
        return whole_norms(tensors)

    def agree_(self, flags: Sequence[Tensor]) -> None:
        """See Layout: all ranks have the same gradients, and so the same flags."""

    def collect(self) -> None:
        """See Layout."""
        self._weights.hand_gradients()

    def publish(self) -> None:
        """See Layout."""
        self._weights.publish()

    def reload(self) -> None:
        """See Layout."""
        self._weights.publish()
