"""Strategies as a user would write them: one that works, and what can be wrong with one."""

import sys
from dataclasses import dataclass
from typing import Any

from lockstep.core.mesh import Mesh
from lockstep.parallel.data_parallel import DataParallelEngine
from lockstep.parallel.engine import Engine
from lockstep.parallel.layouts.replicated import replicated
from lockstep.strategies.base import Traits


@dataclass(frozen=True)
class Late:
    """Data parallelism that sends gradients once backward is done."""

    most: int = 64
    fault: str = ""

    @property
    def traits(self) -> Traits:
        return Traits(
            cuts="the micro-batches of a step",
            needs="at most as many processes as micro-batches",
            communication="the sum of the gradients, once a step",
        )

    def check(self, processes: int, microbatches: int) -> None:
        if self.fault == "check":
            raise RuntimeError("not today")

    def mesh(self, processes: int) -> Mesh:
        return Mesh(replicate=2 if self.fault == "mesh" else processes)

    def start(self, problem: Any, make_optimizer: Any, world: Any, numerics: Any) -> Engine:
        if self.fault == "start":
            raise RuntimeError("no engine")
        mesh = self.mesh(world.size)
        make_layout = replicated(world, mesh, bucket_bytes=sys.maxsize)
        return DataParallelEngine(problem, make_optimizer, world, numerics, mesh, make_layout)


@dataclass(frozen=True)
class Empty:
    """Lacks nearly everything."""

    most: int = 64


class Plain:
    """No dataclass."""
