"""ZeRO stage 1: data parallelism in which the processes shard the optimizer state.

Rajbhandari et al. 2020, "ZeRO: Memory optimizations toward training trillion parameter models", section 5.1.
"""

from dataclasses import dataclass
from typing import ClassVar, final

from lockstep.core.work import check_microbatches
from lockstep.parallel.data_parallel import DataParallelEngine
from lockstep.parallel.layouts.rows import make_row_layout
from lockstep.strategies.base import Engine, MakeOptimizer, Mesh, Mib, Numerics, Problem, Traits, World


@final
@dataclass(frozen=True)
class Strategy:
    """The options of ZeRO stage 1.

    - `bucket_mib`: the approximate bucket size of the gradient communication, which overlaps with the backward pass.
    - `offload`: keep the optimizer state in CPU memory, except during its update.
    """

    bucket_mib: Mib = 8.0
    offload: bool = False

    traits: ClassVar[Traits] = Traits(
        cuts="the micro-batches of a step; the optimizer state, by rows",
        needs="at most as many processes as micro-batches; an optimizer that updates each tensor independently",
        communication="the sum of the gradients and the new parameters, once per step",
        cuts_rows=True,
        lends_wholes=True,
        syncs_batchnorm=True,
        cuts_sequences=True,
    )

    def check(self, processes: int, microbatches: int) -> None:
        """Raise UsageError if there are fewer micro-batches than processes."""
        check_microbatches(processes, microbatches)

    def mesh(self, processes: int) -> Mesh:
        """Return a mesh in which each process is a replica."""
        return Mesh(replicate=processes)

    def start(self, problem: Problem, make_optimizer: MakeOptimizer, world: World, numerics: Numerics) -> Engine:
        """Return the engine of this rank."""
        mesh = self.mesh(world.size)
        bucket_bytes, chunks = int(self.bucket_mib * 2**20), numerics.recipe.model.sequence_chunks
        make_layout = make_row_layout(world, mesh, bucket_bytes, offload=self.offload, num_chunks=chunks)
        return DataParallelEngine(problem, make_optimizer, world, numerics, mesh, make_layout)
