"""One process with the whole model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, final

from lockstep.errors import UsageError
from lockstep.parallel.engine import Engine
from lockstep.parallel.local import LocalEngine, MakeOptimizer, Numerics
from lockstep.runtime.world import World
from lockstep.tasks.base import Task


@final
@dataclass(frozen=True)
class Strategy:
    """No other process takes part; more micro-batches than one are gradient accumulation."""

    exactness: ClassVar[Literal["bits", "close"]] = "bits"
    cuts: ClassVar[str] = "nothing"
    needs: ClassVar[str] = "one process; memory for the whole model and its optimizer state"
    communication: ClassVar[str] = "none"

    def check(self, processes: int, microbatches: int) -> None:
        """Raise UsageError for more than one process."""
        if processes != 1:
            raise UsageError(f"strategy single: {processes} processes; use 1, or strategy ddp")

    def start(self, task: Task, make_optimizer: MakeOptimizer, world: World, numerics: Numerics) -> Engine:
        """Return the engine."""
        return LocalEngine(task, make_optimizer, world, numerics, bucket_bytes=0)
