"""Expert parallelism: data parallelism whose processes share out the experts of mixtures.

Lepikhin et al. 2021, "GShard: Scaling Giant Models with Conditional Computation and Automatic Sharding" (ICLR). Rows go
to the process that has their expert, and what it makes of them comes back (parallel/tensor/experts.py). Into how many
groups the experts are cut is the recipe's (`recipe.model.chunks`).
"""

from dataclasses import dataclass
from typing import ClassVar, final

from lockstep.core.work import check_divides, check_work
from lockstep.parallel.layouts.experts import check_experts
from lockstep.parallel.mesh_engine import mesh_engine
from lockstep.strategies.base import Count, Engine, Inputs, MakeOptimizer, Mesh, Mib, Numerics, Problem, Traits, World
from lockstep.tasks.base import Build


@final
@dataclass(frozen=True)
class Strategy:
    """`replicate`: how many replicas of the experts there are, each shared by as many processes. `bucket_mib`:
    gradients of all but experts are exchanged in pieces of about this size, during backward.
    """

    replicate: Count = 1
    bucket_mib: Mib = 8.0

    traits: ClassVar[Traits] = Traits(
        cuts="the micro-batches of a step; the experts of mixtures",
        needs="at most as many processes as micro-batches; recipe.model.chunks, which the processes of a "
        "replica divide; a model with experts that are known, or recipe.model.plan; an optimizer that works "
        "element by element",
        communication="for each mixture and micro-batch the rows and what experts made of them, forward and "
        "backward; the sum of the other gradients once a step, with replicate of all gradients",
        cuts_rows=True,
        compiles=False,
        by_peers=True,  # how many rows come
    )

    def check(self, processes: int, microbatches: int) -> None:
        """Raise UsageError where the replicas do not divide the processes, or some would never have work."""
        check_divides(f"strategy expert: replicate={self.replicate}", self.replicate, processes)
        check_work(processes, microbatches)

    def check_model(self, build: Build, example: Inputs | None, processes: int, *, whole_blocks: bool = False) -> None:
        """Raise UsageError where the model that `build` builds has no groups of experts for so many processes."""
        check_experts(build, self.mesh(processes).expert, "expert")

    def mesh(self, processes: int) -> Mesh:
        """See Strategy."""
        return Mesh(replicate=self.replicate, expert=processes // self.replicate)

    def start(self, problem: Problem, make_optimizer: MakeOptimizer, world: World, numerics: Numerics) -> Engine:
        """Return the engine."""
        return mesh_engine(problem, make_optimizer, world, numerics, self.mesh(world.size), bucket_mib=self.bucket_mib)
