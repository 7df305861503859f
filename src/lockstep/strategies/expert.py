"""Expert parallelism: data parallelism in which the processes shard the experts of mixture-of-experts layers.

Lepikhin et al. 2021, "GShard: Scaling Giant Models with Conditional Computation and Automatic Sharding" (ICLR). Each
row is sent to the process that holds its expert, and this process sends the output back (parallel/tensor/experts.py).
The recipe sets the number of groups into which the experts are split (`recipe.model.chunks`).
"""

from dataclasses import dataclass
from typing import ClassVar, final

from lockstep.core.work import check_divides, check_microbatches
from lockstep.parallel.layouts.experts import check_experts
from lockstep.parallel.mesh_engine import make_mesh_engine
from lockstep.strategies.base import Count, Engine, Inputs, MakeOptimizer, Mesh, Mib, Numerics, Problem, Traits, World
from lockstep.tasks.base import ModelFactory


@final
@dataclass(frozen=True)
class Strategy:
    """The options of expert parallelism.

    - `replicate`: the number of replicas of the experts. Each replica is sharded over the same number of processes.
    - `bucket_mib`: the approximate bucket size of the communication of all gradients except those of experts, which
      overlaps with the backward pass.
    """

    replicate: Count = 1
    bucket_mib: Mib = 8.0

    traits: ClassVar[Traits] = Traits(
        cuts="the micro-batches of a step; the experts of mixture-of-experts layers",
        needs="at most as many processes as micro-batches; recipe.model.chunks, a multiple of the processes per "
        "replica; a model whose experts are known, or recipe.model.plan; an optimizer that updates each "
        "tensor independently",
        communication="for each mixture-of-experts layer and micro-batch, the rows and the outputs of the experts, "
        "forward and backward; the sum of the other gradients once per step, with replicate that of all gradients",
        cuts_rows=True,
        lends_wholes=True,
        compiles=False,
        by_peers=True,  # a rank receives a number of rows that depends on the data of its peers
    )

    def check(self, processes: int, microbatches: int) -> None:
        """Raise UsageError if the replicas don't divide the processes, or if a process would have no micro-batches."""
        check_divides(f"strategy expert: replicate={self.replicate}", self.replicate, processes)
        check_microbatches(processes, microbatches)

    def check_model(
        self, build: ModelFactory, example: Inputs | None, processes: int, *, whole_blocks: bool = False
    ) -> None:
        """Raise UsageError if the experts of the model that `build` returns can't be split over these processes."""
        check_experts(build, self.mesh(processes).expert, "expert")

    def mesh(self, processes: int) -> Mesh:
        """Return a mesh of replicas whose processes share the experts."""
        return Mesh(replicate=self.replicate, expert=processes // self.replicate)

    def start(self, problem: Problem, make_optimizer: MakeOptimizer, world: World, numerics: Numerics) -> Engine:
        """Return the engine of this rank."""
        return make_mesh_engine(
            problem, make_optimizer, world, numerics, self.mesh(world.size), bucket_mib=self.bucket_mib
        )
