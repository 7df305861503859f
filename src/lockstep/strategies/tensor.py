"""Tensor parallelism: layers are split into chunks of heads and features, which are distributed over the processes.

Shoeybi et al. 2019, "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism", section 3.
The recipe sets the layers that are split and the number of chunks (`recipe.model.chunks`), so the bits are the same as
with one process that computes all chunks (parallel/tensor/chunks.py).
"""

from dataclasses import dataclass
from typing import final

from lockstep.core.work import check_divides, check_microbatches
from lockstep.device.meta import build_on_meta
from lockstep.parallel.mesh_engine import make_mesh_engine
from lockstep.parallel.tensor.sequence_parallel import check_sequence_parallel
from lockstep.parallel.tensor.slices import check_distributable, find_split_layers
from lockstep.strategies.base import Count, Engine, Inputs, MakeOptimizer, Mesh, Mib, Numerics, Problem, Traits, World
from lockstep.tasks.base import ModelFactory


@final
@dataclass(frozen=True)
class Strategy:
    """The options of tensor parallelism.

    - `replicate`: the number of replicas. Each replica processes some of the micro-batches.
    - `sequence_parallel`: the processes of a replica split the sequences outside of the split layers.
    - `bucket_mib`: the approximate bucket size of the gradient communication between replicas, which overlaps with the
      backward pass.
    """

    replicate: Count = 1
    sequence_parallel: bool = False
    bucket_mib: Mib = 8.0

    @property
    def traits(self) -> Traits:
        """The properties of the strategy with its current options."""
        return Traits(
            cuts="the heads and features of attention and feed-forward layers; with replicate, also the micro-batches",
            needs="recipe.model.chunks, a multiple of the processes per replica; a model whose layers are known, or "
            "recipe.model.plan; an optimizer that updates each tensor independently",
            communication="the sum of the outputs of each split pair of layers, forward and backward, for each "
            "micro-batch; with sequence_parallel, an all-gather of its inputs and a reduce-scatter of its outputs "
            "instead; with replicate, the sum of the gradients once per step",
            cuts_rows=True,
            lends_wholes=True,
            compiles=False,
            cuts_sequences=True,
            spreads_sequences=self.sequence_parallel,
        )

    def check(self, processes: int, microbatches: int) -> None:
        """Raise UsageError if the replicas don't divide the processes, or if a replica would have no micro-batches."""
        check_divides(f"strategy tensor: replicate={self.replicate}", self.replicate, processes)
        check_microbatches(self.replicate, microbatches)

    def check_model(
        self, build: ModelFactory, example: Inputs | None, processes: int, *, whole_blocks: bool = False
    ) -> None:
        """Raise UsageError if these processes can't share the chunks of the model that `build` returns."""
        blank = build_on_meta(build)
        check_distributable(find_split_layers(blank), self.mesh(processes).tensor)
        if self.sequence_parallel:
            check_sequence_parallel(blank, example)

    def mesh(self, processes: int) -> Mesh:
        """Return a mesh of replicas whose processes share the chunks of each layer."""
        return Mesh(replicate=self.replicate, tensor=processes // self.replicate)

    def start(self, problem: Problem, make_optimizer: MakeOptimizer, world: World, numerics: Numerics) -> Engine:
        """Return the engine of this rank."""
        mesh, spread = self.mesh(world.size), self.sequence_parallel
        return make_mesh_engine(
            problem, make_optimizer, world, numerics, mesh, bucket_mib=self.bucket_mib, sequence_parallel=spread
        )
