"""Training in a single process with the full model."""

from dataclasses import dataclass
from typing import ClassVar, final

from lockstep.errors import UsageError
from lockstep.parallel.mesh_engine import make_mesh_engine
from lockstep.strategies.base import Engine, MakeOptimizer, Mesh, Numerics, Problem, Traits, World


@final
@dataclass(frozen=True)
class Strategy:
    """The strategy for a single process, which has no options. Gradients are accumulated over micro-batches."""

    traits: ClassVar[Traits] = Traits(
        cuts="nothing",
        needs="one process; memory for the whole model and its optimizer state",
        communication="none",
        lends_wholes=True,
        syncs_batchnorm=True,
        cuts_sequences=True,
    )

    def check(self, processes: int, microbatches: int) -> None:
        """Raise UsageError for more than one process."""
        if processes != 1:
            raise UsageError(
                f"strategy single: requires 1 process, got {processes}; use placement.processes=1 or strategy ddp"
            )

    def mesh(self, processes: int) -> Mesh:
        """Return a mesh of one process."""
        return Mesh(replicate=processes)

    def start(self, problem: Problem, make_optimizer: MakeOptimizer, world: World, numerics: Numerics) -> Engine:
        """Return the engine of this rank."""
        return make_mesh_engine(problem, make_optimizer, world, numerics, self.mesh(world.size))
