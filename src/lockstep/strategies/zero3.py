"""ZeRO stage 3: processes shard parameters, gradients and optimizer state.

Rajbhandari et al. 2020, "ZeRO: Memory optimizations toward training trillion parameter models", section 5.3.
Uses torch's fully_shard (FSDP2), block by block.
"""

from dataclasses import dataclass
from typing import ClassVar, final

from lockstep.core.work import check_microbatches, check_multiple_processes
from lockstep.parallel.mesh_engine import make_mesh_engine
from lockstep.strategies.base import Engine, MakeOptimizer, Mesh, Numerics, Problem, Traits, World


@final
@dataclass(frozen=True)
class Strategy:
    """The options of ZeRO stage 3.

    - `offload`: keep shards in CPU memory, except while a block's computation or update needs them.
    """

    offload: bool = False

    traits: ClassVar[Traits] = Traits(
        cuts="the micro-batches of a step; parameters, gradients and optimizer state, by rows",
        needs="at most as many processes as micro-batches; an optimizer that updates each tensor independently",
        communication="the parameters twice and the gradients once for each micro-batch, block by block",
        cuts_rows=True,
        lends_wholes=True,
        syncs_batchnorm=True,
    )

    def check(self, processes: int, microbatches: int) -> None:
        """Raise UsageError for a single process, or if there are fewer micro-batches than processes."""
        check_microbatches(processes, microbatches)
        check_multiple_processes(processes, "zero3")

    def mesh(self, processes: int) -> Mesh:
        """Return a mesh of one replica, which is sharded over all processes."""
        return Mesh(shard=processes)

    def start(self, problem: Problem, make_optimizer: MakeOptimizer, world: World, numerics: Numerics) -> Engine:
        """Return the engine of this rank."""
        return make_mesh_engine(problem, make_optimizer, world, numerics, self.mesh(world.size), offload=self.offload)
