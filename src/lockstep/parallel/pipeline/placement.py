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
    """The stages and the pipeline of this rank. The stages of the model are numbered 0 to `last_stage`."""

    def __init__(self, pipeline_shape: PipelineShape, world: World) -> None:
        pipelines = pipeline_shape.replicas * pipeline_shape.sharers
        # Number of ranks in a pipeline.
        self.num_ranks = world.size // (pipelines * pipeline_shape.tensor * pipeline_shape.context)
        self.mesh = Mesh(
            replicate=pipelines, pipe=self.num_ranks, tensor=pipeline_shape.tensor, context=pipeline_shape.context
        )
        self.coordinate = self.mesh.get_coordinates(world.rank)
        self.last_stage = self.num_ranks * pipeline_shape.stages_per_rank - 1
        self.stages = range(self.coordinate.pipe, self.last_stage + 1, self.num_ranks)
        # Whether, among the ranks with the same rows or the same full tensors, this rank is the one that reports them.
        self.rows_primary = self.coordinate.replicate < pipeline_shape.sharers and self.coordinate.context == 0
        self.whole_primary = self.coordinate.replicate == self.coordinate.context == 0
        # The groups of ranks that shard the optimizer state of their stages: the `pipe` axis of a helper mesh.
        lengths = {"shard": self.num_ranks, "tensor": pipeline_shape.tensor, "context": pipeline_shape.context}
        self.sharing_groups = Mesh(
            replicate=pipeline_shape.replicas, pipe=pipeline_shape.sharers, **lengths
        ).get_groups("pipe")

    def get_rank(self, stage: int) -> int:
        """Return the rank in this pipeline that has `stage`."""
        return self.mesh.get_rank(self.coordinate._replace(pipe=stage % self.num_ranks))

    def get_peer_ranks(self, stages: Collection[int]) -> set[int]:
        """Return the other ranks that have these stages. Ignores stages that don't exist."""
        own_rank = self.get_rank(self.coordinate.pipe)
        return {self.get_rank(stage) for stage in stages if 0 <= stage <= self.last_stage} - {own_rank}
