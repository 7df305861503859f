"""The engine of a mesh: what the ranks along each of its axes share out, and how that goes together.

Most strategies are a mesh of which one or two axes have more than one rank. Along `replicate` ranks share the
micro-batches alone; along `shard` they keep the model in rows, along `expert` its experts, along `tensor` slices of its
layers, along `context` positions of sequences. Pipelines have an engine of their own (parallel/pipeline/engine.py).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from lockstep.comm.world import World
from lockstep.core.mesh import Mesh
from lockstep.parallel.context.seats import leaves_of
from lockstep.parallel.data_parallel import DataParallelEngine
from lockstep.parallel.layouts.dispatched import dispatched, own_experts
from lockstep.parallel.layouts.replicated import replicated
from lockstep.parallel.layouts.sharded import sharded
from lockstep.parallel.layouts.spread import spread_out
from lockstep.parallel.numerics import MakeOptimizer, Numerics
from lockstep.parallel.tensor.slices import own_slice, sliced
from lockstep.parallel.tensor.spread import spread_leaves
from lockstep.tasks.base import Problem


def mesh_engine(
    problem: Problem,
    make_optimizer: MakeOptimizer,
    world: World,
    numerics: Numerics,
    mesh: Mesh,
    *,
    bucket_mib: float = 0.0,
    keep_gathered: bool = False,
    offload: bool = False,
    sequence_parallel: bool = False,
) -> DataParallelEngine:
    """Return this rank's engine on a mesh without pipelines. All ranks call it.

    Gradients that are exchanged in buckets are so in buckets of about `bucket_mib` MiB. For `keep_gathered` and
    `offload` see layouts/sharded.py. With `sequence_parallel` ranks along tensor share sequences where no layer is cut.
    """
    bucket_bytes, chunks = int(bucket_mib * 2**20), numerics.sequence_chunks
    spreads = sequence_parallel and mesh.tensor > 1
    if mesh.expert > 1:
        problem = replace(problem, build_model=partial(own_experts, problem.build_model, world, mesh))
        make_layout = dispatched(world, mesh, bucket_bytes)
    elif mesh.shard > 1:
        make_layout = sharded(world, mesh, keep_gathered, offload, chunks)
    elif spreads:
        make_layout = spread_out(world, mesh, bucket_bytes, chunks)
    else:
        make_layout = replicated(world, mesh, bucket_bytes, chunks=chunks)
    if mesh.tensor > 1:
        problem = replace(problem, build_model=partial(own_slice, problem.build_model, world, mesh))
        make_layout = sliced(world, mesh, make_layout)
    leaves = partial(spread_leaves, mesh) if spreads else leaves_of
    over = mesh.spread if spreads else mesh
    return DataParallelEngine(problem, make_optimizer, world, numerics, over, make_layout, make_leaves=leaves)
