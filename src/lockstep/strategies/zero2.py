"""ZeRO, second stage: processes share the optimizer's state and the gradients, and from step to step the parameters.

Rajbhandari et al. 2020, "ZeRO: Memory optimizations toward training trillion parameter models", section 5.2. On torch's
fully_shard, as FSDP's SHARD_GRAD_OP: parameters are gathered once a step, and are whole from forward to backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, final

from lockstep.comm.world import World
from lockstep.core.mesh import Place
from lockstep.core.work import check_work
from lockstep.errors import UsageError
from lockstep.parallel.data_parallel import DataParallelEngine
from lockstep.parallel.engine import Engine
from lockstep.parallel.layouts.sharded import sharded
from lockstep.parallel.numerics import MakeOptimizer, Numerics
from lockstep.tasks.base import Problem


@final
@dataclass(frozen=True)
class Strategy:
    """`offload`: what is cut is in the memory of the CPU but while a block computes with it; the CPU updates it."""

    exactness: ClassVar[Literal["bits", "close"]] = "bits"
    cuts: ClassVar[str] = "the micro-batches of a step; gradients and optimizer state, by rows"
    needs: ClassVar[str] = "at most as many processes as micro-batches; an optimizer that works element by element"
    recomputes: ClassVar[bool] = False
    compiles: ClassVar[bool] = True
    cuts_model: ClassVar[bool] = False
    cuts_rows: ClassVar[bool] = True
    communication: ClassVar[str] = "the parameters once a step, the gradients of each micro-batch"

    offload: bool = False

    def check(self, processes: int, microbatches: int) -> None:
        """Raise UsageError where some process would never have work, or none would share with another."""
        check_work(processes, microbatches)
        if processes == 1:
            raise UsageError("strategy zero2: one process has nobody to share with; use 2 or more, or strategy single")

    def place(self, rank: int, size: int) -> Place:
        """Return where a rank stands: all take turns in the micro-batches."""
        return Place(member=rank, members=size)

    def start(self, problem: Problem, make_optimizer: MakeOptimizer, world: World, numerics: Numerics) -> Engine:
        """Return the engine."""
        places = [self.place(rank, world.size) for rank in range(world.size)]
        lay = sharded(world, places[world.rank], keep_gathered=True, offload=self.offload)
        return DataParallelEngine(problem, make_optimizer, world, numerics, places, lay)
