"""ZeRO, first stage: data parallelism whose processes share the optimizer's state.

Rajbhandari et al. 2020, "ZeRO: Memory optimizations toward training trillion parameter models", section 5.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, final

from pydantic import Field

from lockstep.comm.world import World
from lockstep.core.mesh import Place
from lockstep.core.work import check_work
from lockstep.parallel.data_parallel import DataParallelEngine
from lockstep.parallel.engine import Engine
from lockstep.parallel.layouts.rows import rows
from lockstep.parallel.numerics import MakeOptimizer, Numerics
from lockstep.tasks.base import Problem


@final
@dataclass(frozen=True)
class Strategy:
    """`bucket_mib`: gradients are exchanged in pieces of about this size, while backward goes on. `offload`: the
    optimizer's state is in the memory of the CPU, which does the update.
    """

    exactness: ClassVar[Literal["bits", "close"]] = "bits"
    cuts: ClassVar[str] = "the micro-batches of a step; the optimizer's state, by rows"
    needs: ClassVar[str] = "at most as many processes as micro-batches; an optimizer that works element by element"
    recomputes: ClassVar[bool] = False
    compiles: ClassVar[bool] = True
    cuts_model: ClassVar[bool] = False
    cuts_rows: ClassVar[bool] = True
    communication: ClassVar[str] = "the sum of the gradients and the new parameters, once a step"

    bucket_mib: Annotated[float, Field(gt=0)] = 8.0
    offload: bool = False

    def check(self, processes: int, microbatches: int) -> None:
        """Raise UsageError where some process would never have work."""
        check_work(processes, microbatches)

    def place(self, rank: int, size: int) -> Place:
        """Return where a rank stands: it has a contiguous part of the micro-batches."""
        return Place(replica=rank, replicas=size)

    def start(self, problem: Problem, make_optimizer: MakeOptimizer, world: World, numerics: Numerics) -> Engine:
        """Return the engine."""
        places = [self.place(rank, world.size) for rank in range(world.size)]
        lay = rows(world, places, bucket_bytes=int(self.bucket_mib * 2**20), offload=self.offload)
        return DataParallelEngine(problem, make_optimizer, world, numerics, places, lay)
