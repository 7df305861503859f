"""Creates the engine for a mesh, with the layout and the work units for the axes that have more than one rank.

The axes of the mesh have these roles:
- Along `replicate`, ranks only split the micro-batches.
- Along `shard`, ranks hold rows of the model.
- Along `expert`, ranks hold experts of the model.
- Along `tensor`, ranks hold slices of the layers.
- Along `context`, ranks compute different positions of the sequences.

In most strategies, one or two axes have more than one rank. Pipelines have a separate engine
(parallel/pipeline/engine.py).
"""

from dataclasses import replace
from functools import partial

from lockstep.comm.world import World
from lockstep.core.mesh import Mesh
from lockstep.parallel.context.sequence_chunks import make_work_units
from lockstep.parallel.data_parallel import DataParallelEngine
from lockstep.parallel.layouts.replicated import replicated
from lockstep.parallel.numerics import MakeOptimizer, Numerics
from lockstep.tasks.base import Problem


def make_mesh_engine(
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
    """Create this rank's engine for a mesh without pipelines. All ranks must call this function.

    If gradients are reduced in buckets, a bucket has about `bucket_mib` MiB. For `keep_gathered` and `offload`, see
    layouts/sharded.py. If `sequence_parallel` is set, ranks along `tensor` also split the sequences, except in the
    layers that they hold slices of.
    """
    bucket_bytes, chunks = int(bucket_mib * 2**20), numerics.recipe.model.sequence_chunks
    splits_sequences = sequence_parallel and mesh.tensor > 1
    work_mesh, make_units = mesh, make_work_units
    # Import the code of an axis only if the mesh uses it: importing fully_shard takes a second and 45 MiB on each rank.
    if mesh.expert > 1:
        from lockstep.parallel.layouts.experts import build_expert_slice, make_expert_layout

        problem = replace(problem, build_model=partial(build_expert_slice, problem.build_model, world, mesh))
        make_layout = make_expert_layout(world, mesh, bucket_bytes)
    elif mesh.shard > 1:
        from lockstep.parallel.layouts.sharded import make_sharded_layout

        make_layout = make_sharded_layout(world, mesh, keep_gathered, offload, chunks)
    elif splits_sequences:
        from lockstep.parallel.layouts.sequence_parallel import make_sequence_parallel_layout
        from lockstep.parallel.tensor.sequence_parallel import make_sequence_parallel_units

        make_layout = make_sequence_parallel_layout(world, mesh, bucket_bytes, chunks)
        work_mesh, make_units = mesh.sequence_mesh, partial(make_sequence_parallel_units, mesh)
    else:
        make_layout = replicated(world, mesh, bucket_bytes, chunks=chunks)
    if mesh.tensor > 1:
        from lockstep.parallel.tensor.slices import build_slice, make_slice_layout

        problem = replace(problem, build_model=partial(build_slice, problem.build_model, world, mesh))
        make_layout = make_slice_layout(world, mesh, make_layout)
    return DataParallelEngine(problem, make_optimizer, world, numerics, work_mesh, make_layout, make_units=make_units)
