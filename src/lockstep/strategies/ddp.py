"""Data parallelism: the whole model in each process, which shares the micro-batches of a step.

Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training" (VLDB), gave the name and the
buckets. What is ours is the order of the sum: that of one process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final, Literal, final

import torch
from pydantic import Field

from lockstep.comm.world import World
from lockstep.core.mesh import Mesh
from lockstep.core.work import check_work
from lockstep.parallel.data_parallel import DataParallelEngine
from lockstep.parallel.engine import Engine
from lockstep.parallel.layouts.replicated import replicated
from lockstep.parallel.numerics import MakeOptimizer, Numerics
from lockstep.strategies.base import Traits
from lockstep.tasks.base import Problem

_SENT: Final = {"fp16": torch.float16, "bf16": torch.bfloat16}


@final
@dataclass(frozen=True)
class Strategy:
    """`bucket_mib`: gradients are exchanged in pieces of about this size, during backward. `compress`: what they are
    rounded to before they are sent and added; the result then is close to that of one process, and no more.
    """

    bucket_mib: Annotated[float, Field(gt=0)] = 8.0
    compress: Literal["none", "fp16", "bf16"] = "none"

    @property
    def traits(self) -> Traits:
        """See Strategy."""
        return Traits(
            cuts="the micro-batches of a step",
            needs="at most as many processes as micro-batches; memory for the whole model in each",
            communication="the sum of the gradients, once a step, while backward goes on"
            + ("" if self._sent is None else f", in {self.compress}"),
            exactness="bits" if self._sent is None else "close",
            sent=None if self.compress == "none" else self.compress,
            syncs_batchnorm=True,
        )

    def check(self, processes: int, microbatches: int) -> None:
        """Raise UsageError where some process would never have work."""
        check_work(processes, microbatches)

    def mesh(self, processes: int) -> Mesh:
        """See Strategy."""
        return Mesh(replicate=processes)

    def start(self, problem: Problem, make_optimizer: MakeOptimizer, world: World, numerics: Numerics) -> Engine:
        """Return the engine."""
        mesh = self.mesh(world.size)
        make_layout = replicated(world, mesh, bucket_bytes=int(self.bucket_mib * 2**20), sent=self._sent)
        return DataParallelEngine(problem, make_optimizer, world, numerics, mesh, make_layout)

    @property
    def _sent(self) -> torch.dtype | None:
        return _SENT.get(self.compress)
