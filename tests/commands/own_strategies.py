"""Strategies as a user would write them: one that works, and what can be wrong with one."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from lockstep.core.mesh import Place
from lockstep.parallel.data_parallel import DataParallelEngine
from lockstep.parallel.engine import Engine
from lockstep.parallel.layouts.replicated import whole


@dataclass(frozen=True)
class Late:
    """Data parallelism that sends gradients once backward is done."""

    exactness: ClassVar[Literal["bits", "close"]] = "bits"
    cuts: ClassVar[str] = "the micro-batches of a step"
    needs: ClassVar[str] = "at most as many processes as micro-batches"
    communication: ClassVar[str] = "the sum of the gradients, once a step"
    recomputes: ClassVar[bool] = False
    compiles: ClassVar[bool] = True
    cuts_model: ClassVar[bool] = False
    cuts_rows: ClassVar[bool] = False

    most: int = 64
    fault: str = ""

    def check(self, processes: int, microbatches: int) -> None:
        if self.fault == "check":
            raise RuntimeError("not today")

    def place(self, rank: int, size: int) -> Place:
        if self.fault == "place":
            return Place()
        return Place(replica=rank, replicas=size)

    def start(self, problem: Any, make_optimizer: Any, world: Any, numerics: Any) -> Engine:
        if self.fault == "start":
            raise RuntimeError("no engine")
        places = [self.place(rank, world.size) for rank in range(world.size)]
        return DataParallelEngine(
            problem, make_optimizer, world, numerics, places, whole(world, places, bucket_bytes=sys.maxsize)
        )


@dataclass(frozen=True)
class Empty:
    """Lacks nearly everything."""

    exactness: ClassVar[str] = "bits"


class Plain:
    """No dataclass."""
