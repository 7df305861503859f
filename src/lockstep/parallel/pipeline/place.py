"""Where the stages of a pipeline are."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import final

from lockstep.comm.world import World
from lockstep.core.mesh import Mesh
from lockstep.parallel.pipeline.schedule import Schedule


@dataclass(frozen=True)
class PipelineShape:
    """How a model is distributed: in pipelines of consecutive ranks, stage s on rank s mod ranks of each.

    There are `replicas` times `sharers` of them; each next `sharers` share the optimizer's work. `tensor` ranks share
    the chunks of each stage, and `context` ranks the leaves of a micro-batch. `cut` names the modules that begin the
    stages but the first; without, the stages are cut by cost.
    """

    schedule: Schedule = "1f1b"
    replicas: int = 1
    sharers: int = 1
    tensor: int = 1
    context: int = 1
    stages_per_rank: int = 1
    cut: tuple[str, ...] = ()
    recompute: bool = False


@final
class StagePlace:
    """This rank's place in the pipelines of a world: it has the stages `own` of `last` + 1."""

    def __init__(self, pipe: PipelineShape, world: World) -> None:
        pipelines = pipe.replicas * pipe.sharers
        self.ranks = world.size // (pipelines * pipe.tensor * pipe.context)  # of one pipeline
        self.mesh = Mesh(replicate=pipelines, pipe=self.ranks, tensor=pipe.tensor, context=pipe.context)
        self.at = self.mesh.coordinate(world.rank)
        self.last = self.ranks * pipe.stages_per_rank - 1
        self.own = range(self.at.pipe, self.last + 1, self.ranks)
        # Of the ranks that have the same rows of the same stages one reports what all of them know, and of those that
        # have the same stages whole one.
        self.rows_primary = self.at.replicate < pipe.sharers and self.at.context == 0
        self.whole_primary = self.at.replicate == self.at.context == 0
        # The ranks that share the optimizer's work for the same stages, which Mesh knows under the name of pipes.
        lengths = {"shard": self.ranks, "tensor": pipe.tensor, "context": pipe.context}
        self.sharers = Mesh(replicate=pipe.replicas, pipe=pipe.sharers, **lengths).groups("pipe")

    def rank_of(self, stage: int) -> int:
        """Return the rank of this pipeline that has a stage."""
        return self.mesh.rank(self.at._replace(pipe=stage % self.ranks))

    def ranks_of(self, stages: Collection[int]) -> set[int]:
        """Return the other ranks that have these stages, of which some may not exist."""
        mine = self.rank_of(self.at.pipe)
        return {self.rank_of(stage) for stage in stages if 0 <= stage <= self.last} - {mine}
