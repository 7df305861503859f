"""The replicated layout, in which each rank has the full model."""

import torch
from torch import nn

from lockstep.comm.canonical import HalfPrecisionSum
from lockstep.comm.stream import CommStream
from lockstep.comm.world import World
from lockstep.core.mesh import Mesh
from lockstep.parallel.gradients import BucketedGradientSum
from lockstep.parallel.layouts.base import GradientSum, Layout, MakeLayout, get_trainable_parameters
from lockstep.parallel.weights import ReplicatedLayout


def replicated(
    world: World, mesh: Mesh, bucket_bytes: int, sent: torch.dtype | None = None, chunks: int = 1
) -> MakeLayout:
    """Return a function that creates the replicated layout, with gradient buckets of about `bucket_bytes` bytes.

    If `sent` is set, gradients are rounded to this dtype before they are sent. `chunks` is the number of chunks that
    sequences are split into.
    """

    def make_layout(model: nn.Module, stream: CommStream, dtype: torch.dtype | None) -> tuple[Layout, GradientSum]:
        weights = ReplicatedLayout(model, dtype)  # first, because this can change the dtype of parameters
        canonical = world.make_canonical_sum(mesh, "replicate", "context", num_chunks=chunks)
        rank_sum = canonical if sent is None else HalfPrecisionSum(canonical, sent)
        gradients = BucketedGradientSum(
            get_trainable_parameters(model), rank_sum, stream, world.size == 1, bucket_bytes
        )
        return weights, gradients

    return make_layout
