"""Combined parallelism: replicas, pipelines, shards, and slices of sequences and tensors, or replicas and experts.

Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters using Megatron-LM", combine three
of these axes. The more an axis communicates, the closer its ranks are. The ranks that split layers are the closest,
followed by those that split sequences, those that shard parameters, and the stages of a pipeline.
"""

from dataclasses import dataclass
from math import prod
from typing import Final, final

from lockstep.core.work import check_microbatches
from lockstep.device.meta import build_on_meta
from lockstep.errors import UsageError
from lockstep.parallel.layouts.experts import check_experts
from lockstep.parallel.mesh_engine import make_mesh_engine
from lockstep.parallel.pipeline.cut import find_cut
from lockstep.parallel.pipeline.engine import PipelineEngine
from lockstep.parallel.pipeline.placement import PipelineShape
from lockstep.parallel.pipeline.schedule import Schedule, check_stages, resolve_stages_per_rank
from lockstep.parallel.tensor.sequence_parallel import check_sequence_parallel
from lockstep.parallel.tensor.slices import check_distributable, find_split_layers
from lockstep.strategies.base import Count, Engine, Inputs, MakeOptimizer, Mesh, Mib, Numerics, Problem, Traits, World
from lockstep.tasks.base import ModelFactory

_AXES: Final = ("replicate", "pipe", "shard", "expert", "tensor", "context")


@final
@dataclass(frozen=True)
class Strategy:
    """The options of combined parallelism. The lengths of the mesh axes are:

    - `replicate`: the number of replicas. Each replica processes some of the micro-batches. Defaults to the number of
      processes divided by the product of the other lengths.
    - `pipe`: the number of processes of a pipeline.
    - `shard`: the number of members that shard parameters, gradients and optimizer state by rows. In pipelines, they
      only shard the optimizer state.
    - `expert`: the number of processes that shard the experts of mixture-of-experts layers. It can only be combined
      with `replicate`.
    - `tensor`: the number of processes that share the chunks of each layer.
    - `context`: the number of processes that share the chunks of each sequence.

    Other options:

    - `sequence_parallel`: processes that share layers also split the sequences outside of these layers. It can only be
      combined with `tensor`, `replicate` and `context`.
    - `bucket_mib`: the approximate bucket size of the gradient communication, which overlaps with the backward pass.
      Not used with `shard` or `pipe`.

    Options of pipelines:

    - `schedule`: the order of forward and backward passes.
    - `stages_per_rank`: the number of stages of each process. Defaults to 2 for interleaved, and to 1 otherwise.
    - `cut`: the first module of each stage except the first stage. By default, stages are balanced by cost.
    """

    replicate: Count | None = None
    pipe: Count = 1
    shard: Count = 1
    expert: Count = 1
    tensor: Count = 1
    context: Count = 1
    sequence_parallel: bool = False
    schedule: Schedule = "1f1b"
    stages_per_rank: Count | None = None
    cut: tuple[str, ...] = ()
    bucket_mib: Mib = 8.0

    @property
    def traits(self) -> Traits:
        """The properties of the strategy with its current options."""
        return Traits(
            cuts="with replicate, the micro-batches of a step; with pipe, the model, into stages; with shard, "
            "parameters, gradients and optimizer state, by rows; with expert, the experts of mixture-of-experts "
            "layers; with tensor, heads and features; with context, the positions of sequences",
            needs="as many processes as the product of the lengths; everything that pipeline, hsdp, expert, tensor and "
            "context need of a model; expert only supports replicate",
            communication="as pipeline, hsdp, expert, tensor and context, each between the ranks along its axis",
            cuts_rows=self.shard > 1 or self.expert > 1 or self.tensor > 1,
            lends_wholes=self.pipe == 1,
            cuts_sequences=self.expert == 1 and self.schedule != "zero_bubble",
            spreads_sequences=self.sequence_parallel,
            compiles=self.expert == self.tensor == 1 and self.schedule != "zero_bubble",
            syncs_batchnorm=self.pipe == self.expert == self.tensor == 1,
            by_peers=self.pipe > 1 or self.expert > 1,
        )

    def check(self, processes: int, microbatches: int) -> None:
        """Raise UsageError if options conflict, or don't match the number of processes or micro-batches."""
        lengths = {name: getattr(self, name) for name in _AXES}
        axis_lengths = {
            name: length for name, length in lengths.items() if length and (length > 1 or name == "replicate")
        }
        product = prod(axis_lengths.values())
        if processes % product or (self.replicate is not None and product != processes):
            lengths_text = " x ".join(f"{name}={length}" for name, length in axis_lengths.items())
            raise UsageError(
                f"strategy mesh: {lengths_text} is {product} processes, got {processes}; change a length, or don't set "
                f"replicate and use a multiple of {product // (self.replicate or 1)} processes"
            )
        conflicts = [
            f"{name}={axis_lengths[name]}" for name in ("pipe", "shard", "tensor", "context") if name in axis_lengths
        ]
        if self.expert > 1 and conflicts:
            raise UsageError(
                f"strategy mesh: expert={self.expert} is only supported with replicate, not with "
                f"{' and '.join(conflicts)}; don't set expert: the option tensor also splits the experts, and the "
                f"option shard splits them by rows"
            )
        conflicts = [f"{name}={axis_lengths[name]}" for name in ("pipe", "shard", "expert") if name in axis_lengths]
        if self.sequence_parallel and (self.tensor == 1 or conflicts):
            change = f"remove {' and '.join(conflicts)}" if conflicts else "set tensor to 2 or more"
            raise UsageError(
                f"strategy mesh: sequence_parallel requires tensor of 2 or more, and is only supported with replicate "
                f"and context; {change}, or don't set sequence_parallel"
            )
        if self.pipe == 1 and (self.schedule != "1f1b" or self.stages_per_rank is not None):
            raise UsageError(
                "strategy mesh: schedule and stages_per_rank require pipe of 2 or more, got pipe=1; set pipe to 2 or "
                "more, or don't set schedule and stages_per_rank"
            )
        per_rank = self._get_stages_per_rank()
        check_stages("mesh", self.schedule, per_rank, self.pipe * per_rank, self.cut)
        check_microbatches(self._get_num_replicas(processes) * self.shard * self.expert, microbatches)

    def check_model(
        self, build: ModelFactory, example: Inputs | None, processes: int, *, whole_blocks: bool = False
    ) -> None:
        """Raise UsageError if the model that `build` returns can't be split into these stages or chunks."""
        if self.expert > 1:
            check_experts(build, self.expert, "mesh")
            return
        blank = build_on_meta(build)
        check_distributable(find_split_layers(blank), self.tensor)
        if self.sequence_parallel:
            check_sequence_parallel(blank, example)
        if self.pipe > 1:
            find_cut(blank, self.pipe * self._get_stages_per_rank(), example, self.cut, whole_blocks=whole_blocks)

    def mesh(self, processes: int) -> Mesh:
        """Return the mesh. Pipelines that shard the optimizer state have different micro-batches, like replicas."""
        if self.pipe > 1:
            pipelines = self._get_num_replicas(processes) * self.shard
            return Mesh(replicate=pipelines, pipe=self.pipe, context=self.context, tensor=self.tensor)
        return Mesh(self._get_num_replicas(processes), 1, self.shard, self.expert, self.context, self.tensor)

    def start(self, problem: Problem, make_optimizer: MakeOptimizer, world: World, numerics: Numerics) -> Engine:
        """Return the engine of this rank."""
        mesh = self.mesh(world.size)
        if self.pipe > 1:
            replicas, per_rank = self._get_num_replicas(world.size), self._get_stages_per_rank()
            recompute = bool(numerics.recompute_interval)
            pipe = PipelineShape(
                self.schedule, replicas, self.shard, self.tensor, self.context, per_rank, self.cut, recompute
            )
            return PipelineEngine(problem, make_optimizer, world, numerics, pipe)
        spread = self.sequence_parallel
        return make_mesh_engine(
            problem, make_optimizer, world, numerics, mesh, bucket_mib=self.bucket_mib, sequence_parallel=spread
        )

    def _get_stages_per_rank(self) -> int:
        return resolve_stages_per_rank(self.schedule, self.stages_per_rank)

    def _get_num_replicas(self, processes: int) -> int:
        return self.replicate or processes // (self.pipe * self.shard * self.expert * self.tensor * self.context)
