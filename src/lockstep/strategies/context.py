"""Context parallelism: sequences cut into chunks, which processes share.

Jacobs et al. 2023, "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence Transformer
Models". Into how many chunks is the recipe's (`recipe.model.sequence_chunks`): so the bits are those of one process
that computes all chunks (parallel/context/sequence_chunks.py).
"""

from dataclasses import dataclass
from typing import ClassVar, final

from lockstep.core.work import check_divides, check_work
from lockstep.parallel.mesh_engine import mesh_engine
from lockstep.strategies.base import Count, Engine, MakeOptimizer, Mesh, Mib, Numerics, Problem, Traits, World


@final
@dataclass(frozen=True)
class Strategy:
    """`replicate`: how many replicas share the micro-batches. `bucket_mib`: gradients are exchanged in pieces of about
    this size, while the last backward goes on.
    """

    replicate: Count = 1
    bucket_mib: Mib = 8.0

    traits: ClassVar[Traits] = Traits(
        cuts="the positions of each sequence; micro-batches with replicate",
        needs="recipe.model.sequence_chunks, which the processes of a replica divide; a language model that takes "
        "position_ids and calls torch's attention without a mask; memory for the whole model in each",
        communication="queries, keys, values and outputs of each attention, forward and backward, for each "
        "micro-batch; the sum of the gradients once a step, while backward goes on",
        cuts_sequences=True,
    )

    def check(self, processes: int, microbatches: int) -> None:
        """Raise UsageError where the replicas do not divide the processes, or some would never have work."""
        check_divides(f"strategy context: replicate={self.replicate}", self.replicate, processes)
        check_work(self.replicate, microbatches)

    def mesh(self, processes: int) -> Mesh:
        """See Strategy."""
        return Mesh(replicate=self.replicate, context=processes // self.replicate)

    def start(self, problem: Problem, make_optimizer: MakeOptimizer, world: World, numerics: Numerics) -> Engine:
        """Return the engine."""
        return mesh_engine(problem, make_optimizer, world, numerics, self.mesh(world.size), bucket_mib=self.bucket_mib)
