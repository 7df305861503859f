"""ZeRO, second stage: processes share the optimizer's state and the gradients, and from step to step the parameters.

Rajbhandari et al. 2020, "ZeRO: Memory optimizations toward training trillion parameter models", section 5.2. On torch's
fully_shard, as FSDP's SHARD_GRAD_OP: parameters are gathered once a step, and are whole from forward to backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from lockstep.comm.world import World
from lockstep.core.mesh import Mesh
from lockstep.core.work import check_several, check_work
from lockstep.parallel.data_parallel import DataParallelEngine
from lockstep.parallel.engine import Engine
from lockstep.parallel.layouts.sharded import sharded
from lockstep.parallel.numerics import MakeOptimizer, Numerics
from lockstep.strategies.base import Traits
from lockstep.tasks.base import Problem


@final
@dataclass(frozen=True)
class Strategy:
    """`offload`: what is cut is in the memory of the CPU but while a block computes with it; the CPU updates it."""

    offload: bool = False

    @property
    def traits(self) -> Traits:
        """See Strategy."""
        return Traits(
            cuts="the micro-batches of a step; gradients and optimizer state, by rows",
            needs="at most as many processes as micro-batches; an optimizer that works element by element",
            communication="the parameters once a step, the gradients of each micro-batch",
            cuts_rows=True,
            syncs_batchnorm=True,
        )

    def check(self, processes: int, microbatches: int) -> None:
        """Raise UsageError where some process would never have work, or none would share with another."""
        check_work(processes, microbatches)
        check_several(processes, "zero2")

    def mesh(self, processes: int) -> Mesh:
        """See Strategy."""
        return Mesh(shard=processes)

    def start(self, problem: Problem, make_optimizer: MakeOptimizer, world: World, numerics: Numerics) -> Engine:
        """Return the engine."""
        mesh = self.mesh(world.size)
        make_layout = sharded(world, mesh, keep_gathered=True, offload=self.offload)
        return DataParallelEngine(problem, make_optimizer, world, numerics, mesh, make_layout)
