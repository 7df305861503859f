"""Hybrid sharding: replicas of the model, each cut over its members as by ZeRO's third stage.

Zhao et al. 2023, "PyTorch FSDP: Experiences on scaling fully sharded data parallel" (VLDB), section 3.2.2. Members are
ranks that follow each other, as on one host, so parameters travel within it, and between hosts but the gradients' sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, final

from pydantic import Field

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
    """`replicate`: into how many replicas the processes are divided. `offload`: what is cut is in the memory of the CPU
    but while a block computes with it, and the CPU does the update.
    """

    exactness: ClassVar[Literal["bits", "close"]] = "bits"
    cuts: ClassVar[str] = "the micro-batches of a step; parameters, gradients and optimizer state, by rows"
    needs: ClassVar[str] = "processes that the replicas divide; an optimizer that works element by element"
    recomputes: ClassVar[bool] = False
    compiles: ClassVar[bool] = True
    cuts_model: ClassVar[bool] = False
    cuts_rows: ClassVar[bool] = True
    communication: ClassVar[str] = "as zero3 within a replica; between replicas a shard of the gradients once a step"

    replicate: Annotated[int, Field(ge=1)] = 2
    offload: bool = False

    def check(self, processes: int, microbatches: int) -> None:
        """Raise UsageError where the processes cannot be divided, or some would never have work."""
        if processes % self.replicate:
            fitting = [str(number) for number in range(1, processes + 1) if processes % number == 0]
            raise UsageError(
                f"strategy hsdp: replicate={self.replicate} does not divide {processes} processes; "
                f"use {', '.join(fitting)}"
            )
        check_work(processes, microbatches)
        if processes == self.replicate:
            raise UsageError(
                f"strategy hsdp: {processes} processes in {self.replicate} replicas leave one for each, which shares "
                f"with nobody; use more processes, fewer replicas, or strategy ddp"
            )

    def place(self, rank: int, size: int) -> Place:
        """Return where a rank stands: replicas have contiguous parts of the micro-batches, members take turns."""
        members = size // self.replicate
        return Place(rank // members, self.replicate, rank % members, members)

    def start(self, problem: Problem, make_optimizer: MakeOptimizer, world: World, numerics: Numerics) -> Engine:
        """Return the engine."""
        places = [self.place(rank, world.size) for rank in range(world.size)]
        lay = sharded(world, places[world.rank], keep_gathered=False, offload=self.offload)
        return DataParallelEngine(problem, make_optimizer, world, numerics, places, lay)
