"""The placement of pipeline stages on ranks."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import final

from lockstep.comm.world import World
from lockstep.core.mesh import Mesh
from lockstep.parallel.pipeline.schedule import Schedule


@dataclass(frozen=True)
class PipelineShape:
    """The number and shape of the pipelines. In a pipeline of n ranks, stage s is on rank s mod n.

    There are `replicas` * `sharers` pipelines. Groups of `sharers` consecutive pipelines shard the optimizer state.
    Within a pipeline, `tensor` ranks split the layers of each stage, and `context` ranks split the sequences of a
    micro-batch. `cut` contains the name of the first module of each stage except the first. If `cut` is empty, the
    stages are balanced by cost.
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
class StagePlacement:
    """The stages and the pipeline of this rank. The stages of the model are numbered 0 to `last`."""

    def __init__(self, pipe: PipelineShape, world: World) -> None:
        pipelines = pipe.replicas * pipe.sharers
        self.ranks = world.size // (pipelines * pipe.tensor * pipe.context)  # number of ranks in a pipeline
        self.mesh = Mesh(replicate=pipelines, pipe=self.ranks, tensor=pipe.tensor, context=pipe.context)
        self.coordinate = self.mesh.get_coordinates(world.rank)
        self.last = self.ranks * pipe.stages_per_rank - 1
        self.stages = range(self.coordinate.pipe, self.last + 1, self.ranks)
        # Whether this rank reports its tensors, among the ranks with the same rows, or with the same full tensors.
        self.rows_primary = self.coordinate.replicate < pipe.sharers and self.coordinate.context == 0
        self.whole_primary = self.coordinate.replicate == self.coordinate.context == 0
        # The groups of ranks that shard the optimizer state of their stages: the `pipe` axis of a helper mesh.
        lengths = {"shard": self.ranks, "tensor": pipe.tensor, "context": pipe.context}
        self.sharers = Mesh(replicate=pipe.replicas, pipe=pipe.sharers, **lengths).groups("pipe")

    def rank_of(self, stage: int) -> int:
        """Return the rank in this pipeline that has `stage`."""
        return self.mesh.rank(self.coordinate._replace(pipe=stage % self.ranks))

    def ranks_of(self, stages: Collection[int]) -> set[int]:
        """Return the other ranks that have these stages. Ignores stages that don't exist."""
        own_rank = self.rank_of(self.coordinate.pipe)
        return {self.rank_of(stage) for stage in stages if 0 <= stage <= self.last} - {own_rank}
