"""The engine of a mesh: what the ranks along each of its axes share out, and how that goes together.

Most strategies are a mesh of which one or two axes have more than one rank. Along `replicate` ranks share the
micro-batches alone; along `shard` they keep the model in rows, along `expert` its experts, along `tensor` slices of its
layers, along `context` positions of sequences. Pipelines have an engine of their own (parallel/pipeline/engine.py).
"""

from dataclasses import replace
from functools import partial

from lockstep.comm.world import World
from lockstep.core.mesh import Mesh
from lockstep.parallel.context.sequence_chunks import leaves_of
from lockstep.parallel.data_parallel import DataParallelEngine
from lockstep.parallel.layouts.replicated import replicated
from lockstep.parallel.numerics import MakeOptimizer, Numerics
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
    bucket_bytes, chunks = int(bucket_mib * 2**20), numerics.recipe.model.sequence_chunks
    spreads = sequence_parallel and mesh.tensor > 1
    over, make_leaves = mesh, leaves_of
    # What an axis needs is imported where it is asked for: torch's fully_shard takes a second, and 45 MiB of each rank.
    if mesh.expert > 1:
        from lockstep.parallel.layouts.experts import expert_layout, own_experts

        problem = replace(problem, build_model=partial(own_experts, problem.build_model, world, mesh))
        make_layout = expert_layout(world, mesh, bucket_bytes)
    elif mesh.shard > 1:
        from lockstep.parallel.layouts.sharded import fsdp_layout

        make_layout = fsdp_layout(world, mesh, keep_gathered, offload, chunks)
    elif spreads:
        from lockstep.parallel.layouts.sequence_parallel import sequence_parallel_layout
        from lockstep.parallel.tensor.sequence_parallel import sequence_parallel_leaves

        make_layout = sequence_parallel_layout(world, mesh, bucket_bytes, chunks)
        over, make_leaves = mesh.spread, partial(sequence_parallel_leaves, mesh)
    else:
        make_layout = replicated(world, mesh, bucket_bytes, chunks=chunks)
    if mesh.tensor > 1:
        from lockstep.parallel.tensor.slices import own_slice, slice_layout

        problem = replace(problem, build_model=partial(own_slice, problem.build_model, world, mesh))
        make_layout = slice_layout(world, mesh, make_layout)
    return DataParallelEngine(problem, make_optimizer, world, numerics, over, make_layout, make_leaves=make_leaves)
