"""Pipeline parallelism: the model is split into stages. Each process has one or more stages.

The idea and the first schedule are from Huang et al. 2019, "GPipe". For the sources of the other schedules, see
parallel/pipeline/schedule.py.
"""

from dataclasses import dataclass
from typing import final

from lockstep.common.text import format_count
from lockstep.core.work import check_divides
from lockstep.device.meta import build_on_meta
from lockstep.errors import UsageError
from lockstep.parallel.pipeline.cut import find_cut
from lockstep.parallel.pipeline.engine import PipelineEngine
from lockstep.parallel.pipeline.placement import PipelineShape
from lockstep.parallel.pipeline.schedule import Schedule, check_stages, resolve_stages_per_rank
from lockstep.strategies.base import Count, Engine, Inputs, MakeOptimizer, Mesh, Numerics, Problem, Traits, World
from lockstep.tasks.base import ModelFactory


@final
@dataclass(frozen=True)
class Strategy:
    """The options of pipeline parallelism.

    - `schedule`: the order of forward and backward passes.
    - `replicate`: the number of replicas. Each replica processes some of the micro-batches.
    - `shard`: the number of pipelines in a replica, which share its micro-batches and shard the optimizer state by
      rows.
    - `stages_per_rank`: the number of stages of each process. Defaults to 2 for interleaved, and to 1 otherwise.
    - `cut`: the first module of each stage except the first stage. By default, stages are balanced by cost.
    - `recompute`: keep the inputs of a stage instead of its activations, and recompute the forward pass in the backward
      pass.
    """

    schedule: Schedule = "1f1b"
    replicate: Count = 1
    shard: Count = 1
    stages_per_rank: Count | None = None
    cut: tuple[str, ...] = ()
    recompute: bool = False

    @property
    def traits(self) -> Traits:
        """The properties of the strategy with its current options."""
        return Traits(
            cuts="the model, into stages; with replicate, also the micro-batches; with shard, also the optimizer state",
            needs="a model that calls at least as many modules in sequence as there are stages; with shard, an "
            "element-wise optimizer",
            communication="activations between stages and their gradients, for each micro-batch; with replicate or "
            "shard, the sum of the gradients once per step; with shard, also the new parameters",
            cuts_rows=self.shard > 1,
            # zero_bubble splits the backward pass of a block in two. It can't split a joint backward pass of chunks.
            compiles=self.schedule != "zero_bubble",
            cuts_sequences=self.schedule != "zero_bubble",
            by_peers=True,
        )

    def check(self, processes: int, microbatches: int) -> None:
        """Raise UsageError if options conflict, or don't match the number of processes or micro-batches."""
        per_rank = self._get_stages_per_rank()
        pipelines = self._num_pipelines
        options = " x ".join(
            f"{name}={number}" for name, number in (("replicate", self.replicate), ("shard", self.shard)) if number > 1
        )
        check_divides(f"strategy pipeline: {options}", pipelines, processes)
        if pipelines > microbatches:
            raise UsageError(
                f"strategy pipeline: {options} requires at least {pipelines} micro-batches, got {microbatches}; use at "
                f"most {format_count(microbatches, 'pipeline')}, or set recipe.microbatches={pipelines}, which "
                f"changes the weights"
            )
        check_stages("pipeline", self.schedule, per_rank, processes // pipelines * per_rank, self.cut)

    def check_model(
        self, build: ModelFactory, example: Inputs | None, processes: int, *, whole_blocks: bool = False
    ) -> None:
        """Raise UsageError if the model that `build` returns can't be split into the stages for these processes.

        The model is built on the meta device, or on the CPU if that fails. `example` contains the inputs of the model.
        If `whole_blocks` is set, the model is never split within a block.
        """
        stages = processes // self._num_pipelines * self._get_stages_per_rank()
        find_cut(build_on_meta(build), stages, example, self.cut, whole_blocks=whole_blocks)

    def mesh(self, processes: int) -> Mesh:
        """Return a mesh of pipelines. All ranks of a pipeline have the same micro-batches."""
        return Mesh(replicate=self._num_pipelines, pipe=processes // self._num_pipelines)

    def start(self, problem: Problem, make_optimizer: MakeOptimizer, world: World, numerics: Numerics) -> Engine:
        """Return the engine of this rank."""
        per_rank = self._get_stages_per_rank()
        pipe = PipelineShape(
            self.schedule, self.replicate, self.shard, stages_per_rank=per_rank, cut=self.cut, recompute=self.recompute
        )
        return PipelineEngine(problem, make_optimizer, world, numerics, pipe)

    @property
    def _num_pipelines(self) -> int:
        return self.replicate * self.shard

    def _get_stages_per_rank(self) -> int:
        return resolve_stages_per_rank(self.schedule, self.stages_per_rank)
