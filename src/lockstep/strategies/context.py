"""Context parallelism: sequences are split into chunks, which are distributed over the processes.

Jacobs et al. 2023, "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence Transformer
Models". The recipe sets the number of chunks (`recipe.model.sequence_chunks`), so the bits are the same as with one
process that computes all chunks (parallel/context/sequence_chunks.py).
"""

from dataclasses import dataclass
from typing import ClassVar, final

from lockstep.core.work import check_divides, check_microbatches
from lockstep.parallel.mesh_engine import make_mesh_engine
from lockstep.strategies.base import Count, Engine, MakeOptimizer, Mesh, Mib, Numerics, Problem, Traits, World


@final
@dataclass(frozen=True)
class Strategy:
    """The options of context parallelism.

    - `replicate`: the number of replicas. Each replica processes some of the micro-batches.
    - `bucket_mib`: the approximate bucket size of the gradient communication, which overlaps with the last backward
      pass.
    """

    replicate: Count = 1
    bucket_mib: Mib = 8.0

    traits: ClassVar[Traits] = Traits(
        cuts="the positions of each sequence; with replicate, also the micro-batches",
        needs="recipe.model.sequence_chunks, a multiple of the processes per replica; a language model that takes "
        "position_ids and calls torch's attention without a mask; memory for the whole model on each process",
        communication="queries, keys, values and outputs of each attention, forward and backward, for each "
        "micro-batch; the sum of the gradients once per step, overlapping with backward",
        lends_wholes=True,
        cuts_sequences=True,
    )

    def check(self, processes: int, microbatches: int) -> None:
        """Raise UsageError if the replicas don't divide the processes, or if a replica would have no micro-batches."""
        check_divides(f"strategy context: replicate={self.replicate}", self.replicate, processes)
        check_microbatches(self.replicate, microbatches)

    def mesh(self, processes: int) -> Mesh:
        """Return a mesh of replicas whose processes share the chunks of each sequence."""
        return Mesh(replicate=self.replicate, context=processes // self.replicate)

    def start(self, problem: Problem, make_optimizer: MakeOptimizer, world: World, numerics: Numerics) -> Engine:
        """Return the engine of this rank."""
        return make_mesh_engine(
            problem, make_optimizer, world, numerics, self.mesh(world.size), bucket_mib=self.bucket_mib
        )
