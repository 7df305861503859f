"""Hybrid sharding: the model is replicated, and each replica is sharded over several ranks as in ZeRO stage 3.

Zhao et al. 2023, "PyTorch FSDP: Experiences on scaling fully sharded data parallel" (VLDB), section 3.2.2. The ranks
of a replica are consecutive. If each replica is on one host, parameters are only sent within hosts, and only the
sum of the gradients is sent between hosts.
"""

from dataclasses import dataclass
from typing import ClassVar, final

from lockstep.core.work import check_divides, check_microbatches
from lockstep.errors import UsageError
from lockstep.parallel.mesh_engine import make_mesh_engine
from lockstep.strategies.base import Count, Engine, MakeOptimizer, Mesh, Numerics, Problem, Traits, World


@final
@dataclass(frozen=True)
class Strategy:
    """The options of hybrid sharding.

    - `replicate`: the number of replicas.
    - `offload`: keep shards in CPU memory, except while a block's computation or its optimizer update needs them.
    """

    replicate: Count = 2
    offload: bool = False

    traits: ClassVar[Traits] = Traits(
        cuts="the micro-batches of a step; parameters, gradients and optimizer state, by rows",
        needs="a number of processes that replicate divides; an optimizer that updates each tensor independently",
        communication="as zero3 within a replica; between replicas, a shard of the gradients once per step",
        cuts_rows=True,
        lends_wholes=True,
        syncs_batchnorm=True,
    )

    def check(self, processes: int, microbatches: int) -> None:
        """Raise UsageError if the replicas don't divide the processes, have one process, or have no micro-batches."""
        check_divides(f"strategy hsdp: replicate={self.replicate}", self.replicate, processes)
        check_microbatches(processes, microbatches)
        if processes == self.replicate:
            raise UsageError(
                f"strategy hsdp: {processes} processes with replicate={self.replicate} leave one process per replica, "
                f"so nothing is sharded; use more processes, a smaller replicate, or strategy ddp"
            )

    def mesh(self, processes: int) -> Mesh:
        """Return a mesh of replicas whose processes share the shards."""
        return Mesh(replicate=self.replicate, shard=processes // self.replicate)

    def start(self, problem: Problem, make_optimizer: MakeOptimizer, world: World, numerics: Numerics) -> Engine:
        """Return the engine of this rank."""
        return make_mesh_engine(problem, make_optimizer, world, numerics, self.mesh(world.size), offload=self.offload)
