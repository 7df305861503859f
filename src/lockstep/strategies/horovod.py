"""Data parallelism with gradient sums from Horovod, which depend on the number of processes.

Sergeev and Del Balso 2018, "Horovod: fast and easy distributed deep learning in TensorFlow" (arXiv:1802.05799).
Horovod's DistributedOptimizer starts an all-reduce of each gradient in a hook, and waits for all reductions before the
step. The engine of `ddp` (parallel/gradients.py) does the same with buckets. In this strategy, the engine uses
Horovod's sum, whose order depends on the number of processes. BatchNorm statistics, losses and metrics are added as in
all other strategies.
"""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import final

import torch
from torch import nn

from lockstep.comm.horovod import Compression, Horovod
from lockstep.comm.stream import CommStream
from lockstep.core.work import check_microbatches
from lockstep.errors import UsageError
from lockstep.parallel.data_parallel import DataParallelEngine
from lockstep.parallel.gradients import BucketedGradientSum
from lockstep.parallel.layouts.base import GradientSum, Layout, get_trainable_parameters
from lockstep.parallel.mesh_engine import make_mesh_engine
from lockstep.parallel.weights import ReplicatedLayout
from lockstep.strategies.base import Engine, MakeOptimizer, Mesh, Mib, Numerics, Problem, Traits, World


@final
@dataclass(frozen=True)
class Strategy:
    """The options of data parallelism with Horovod.

    - `compress`: the precision in which gradients are sent and added. `none` keeps the dtype of the gradients.
    - `bucket_mib`: the approximate size of the buckets that are passed to Horovod during the backward pass.
    """

    compress: Compression = "none"
    bucket_mib: Mib = 8.0

    @property
    def traits(self) -> Traits:
        """The properties of the strategy with its current options."""
        return Traits(
            cuts="the micro-batches of a step",
            needs="Horovod (scripts/install-horovod); at most as many processes as micro-batches; memory for the "
            "whole model on each process",
            communication="Horovod's sum of the gradients once per step, overlapping with backward",
            exactness="close",
            sent="fp16" if self.compress == "fp16" else None,
            by_peers=True,
        )

    def check(self, processes: int, microbatches: int) -> None:
        """Raise UsageError if there are fewer micro-batches than processes, or if Horovod isn't installed."""
        check_microbatches(processes, microbatches)
        if processes > 1 and find_spec("horovod") is None:
            raise UsageError(
                "strategy horovod: Horovod is not installed; build it for this torch with scripts/install-horovod, or "
                "use strategy ddp"
            )

    def mesh(self, processes: int) -> Mesh:
        """Return a mesh in which each process is a replica."""
        return Mesh(replicate=processes)

    def start(self, problem: Problem, make_optimizer: MakeOptimizer, world: World, numerics: Numerics) -> Engine:
        """Return the engine of this rank."""
        mesh, bucket_bytes = self.mesh(world.size), int(self.bucket_mib * 2**20)
        if world.size == 1:
            return make_mesh_engine(problem, make_optimizer, world, numerics, mesh)
        horovod = Horovod(world)

        def make_layout(model: nn.Module, stream: CommStream, dtype: torch.dtype | None) -> tuple[Layout, GradientSum]:
            horovod.broadcast(model.state_dict())  # customary with Horovod; the weights are already the same
            weights, horovod_sum = ReplicatedLayout(model, dtype), horovod.make_sum(self.compress)
            gradients = BucketedGradientSum(
                get_trainable_parameters(model), horovod_sum, stream, single_process=False, bucket_bytes=bucket_bytes
            )
            return weights, gradients

        return DataParallelEngine(problem, make_optimizer, world, numerics, mesh, make_layout, horovod.close)
