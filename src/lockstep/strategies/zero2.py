"""ZeRO stage 2: processes shard the optimizer state and the gradients, and between steps also the parameters.

Rajbhandari et al. 2020, "ZeRO: Memory optimizations toward training trillion parameter models", section 5.2. Uses
torch's fully_shard like FSDP's SHARD_GRAD_OP: parameters are gathered once per step, and stay gathered between the
forward pass and the backward pass.
"""

from dataclasses import dataclass
from typing import ClassVar, final

from lockstep.core.work import check_microbatches, check_multiple_processes
from lockstep.parallel.mesh_engine import make_mesh_engine
from lockstep.strategies.base import Engine, MakeOptimizer, Mesh, Numerics, Problem, Traits, World


@final
@dataclass(frozen=True)
class Strategy:
    """The options of ZeRO stage 2.

    - `offload`: keep shards in CPU memory, except while a block's computation or update needs them.
    """

    offload: bool = False

    traits: ClassVar[Traits] = Traits(
        cuts="the micro-batches of a step; gradients and optimizer state, by rows",
        needs="at most as many processes as micro-batches; an optimizer that updates each tensor independently",
        communication="the parameters once per step, the gradients of each micro-batch",
        cuts_rows=True,
        lends_wholes=True,
        syncs_batchnorm=True,
    )

    def check(self, processes: int, microbatches: int) -> None:
        """Raise UsageError for a single process, or if there are fewer micro-batches than processes."""
        check_microbatches(processes, microbatches)
        check_multiple_processes(processes, "zero2")

    def mesh(self, processes: int) -> Mesh:
        """Return a mesh of one replica, which is sharded over all processes."""
        return Mesh(shard=processes)

    def start(self, problem: Problem, make_optimizer: MakeOptimizer, world: World, numerics: Numerics) -> Engine:
        """Return the engine of this rank."""
        mesh = self.mesh(world.size)
        return make_mesh_engine(
            problem, make_optimizer, world, numerics, mesh, keep_gathered=True, offload=self.offload
        )
