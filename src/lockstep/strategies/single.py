"""One process with the whole model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, final

from lockstep.comm.world import World
from lockstep.core.mesh import Place
from lockstep.errors import UsageError
from lockstep.parallel.data_parallel import DataParallelEngine
from lockstep.parallel.engine import Engine
from lockstep.parallel.layouts.replicated import whole
from lockstep.parallel.numerics import MakeOptimizer, Numerics
from lockstep.tasks.base import Problem


@final
@dataclass(frozen=True)
class Strategy:
    """No other process takes part; more micro-batches than one are gradient accumulation."""

    exactness: ClassVar[Literal["bits", "close"]] = "bits"
    cuts: ClassVar[str] = "nothing"
    needs: ClassVar[str] = "one process; memory for the whole model and its optimizer state"
    recomputes: ClassVar[bool] = False
    compiles: ClassVar[bool] = True
    cuts_model: ClassVar[bool] = False
    cuts_rows: ClassVar[bool] = False
    communication: ClassVar[str] = "none"

    def check(self, processes: int, microbatches: int) -> None:
        """Raise UsageError for more than one process."""
        if processes != 1:
            raise UsageError(f"strategy single: {processes} processes; use 1, or strategy ddp")

    def place(self, rank: int, size: int) -> Place:
        """Return where a rank stands: it has a contiguous part of the micro-batches."""
        return Place(replica=rank, replicas=size)

    def start(self, problem: Problem, make_optimizer: MakeOptimizer, world: World, numerics: Numerics) -> Engine:
        """Return the engine."""
        places = [self.place(rank, world.size) for rank in range(world.size)]
        lay = whole(world, places, bucket_bytes=0)
        return DataParallelEngine(problem, make_optimizer, world, numerics, places, lay)
