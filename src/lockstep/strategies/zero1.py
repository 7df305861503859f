"""ZeRO, first stage: data parallelism whose processes share the optimizer's state.

Rajbhandari et al. 2020, "ZeRO: Memory optimizations toward training trillion parameter models", section 5.1.
"""

from dataclasses import dataclass
from typing import ClassVar, final

from lockstep.core.work import check_work
from lockstep.parallel.data_parallel import DataParallelEngine
from lockstep.parallel.layouts.rows import rows
from lockstep.strategies.base import Engine, MakeOptimizer, Mesh, Mib, Numerics, Problem, Traits, World


@final
@dataclass(frozen=True)
class Strategy:
    """`bucket_mib`: gradients are exchanged in pieces of about this size, during backward. `offload`: the
    optimizer's state is in the memory of the CPU, but while its update computes with it.
    """

    bucket_mib: Mib = 8.0
    offload: bool = False

    traits: ClassVar[Traits] = Traits(
        cuts="the micro-batches of a step; the optimizer's state, by rows",
        needs="at most as many processes as micro-batches; an optimizer that works element by element",
        communication="the sum of the gradients and the new parameters, once a step",
        cuts_rows=True,
        syncs_batchnorm=True,
        cuts_sequences=True,
    )

    def check(self, processes: int, microbatches: int) -> None:
        """Raise UsageError where some process would never have work."""
        check_work(processes, microbatches)

    def mesh(self, processes: int) -> Mesh:
        """See Strategy."""
        return Mesh(replicate=processes)

    def start(self, problem: Problem, make_optimizer: MakeOptimizer, world: World, numerics: Numerics) -> Engine:
        """Return the engine."""
        mesh = self.mesh(world.size)
        bucket_bytes, chunks = int(self.bucket_mib * 2**20), numerics.recipe.model.sequence_chunks
        make_layout = rows(world, mesh, bucket_bytes, offload=self.offload, chunks=chunks)
        return DataParallelEngine(problem, make_optimizer, world, numerics, mesh, make_layout)
