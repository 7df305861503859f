"""Expert parallelism: data parallelism whose processes share out the experts of mixtures.

Lepikhin et al. 2021, "GShard: Scaling Giant Models with Conditional Computation and Automatic Sharding" (ICLR). Rows go
to the process that has their expert, and what it makes of them comes back (parallel/tensor/dispatch.py). Into how many
groups the experts are cut is the recipe's (`recipe.model.chunks`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, final

from pydantic import Field
from torch import nn

from lockstep.comm.world import World
from lockstep.core.batch import Inputs
from lockstep.core.mesh import Mesh
from lockstep.core.work import check_work
from lockstep.device.meta import on_meta
from lockstep.errors import UsageError
from lockstep.parallel.data_parallel import DataParallelEngine
from lockstep.parallel.engine import Engine
from lockstep.parallel.layouts.dispatched import dispatched, expert_layers, own_experts
from lockstep.parallel.layouts.replicated import replicated
from lockstep.parallel.numerics import MakeOptimizer, Numerics
from lockstep.parallel.tensor.slices import check_shared, cut_layers
from lockstep.strategies.base import Traits
from lockstep.tasks.base import Problem


@final
@dataclass(frozen=True)
class Strategy:
    """`bucket_mib`: gradients of all but experts are exchanged in pieces of about this size, during backward."""

    bucket_mib: Annotated[float, Field(gt=0)] = 8.0

    @property
    def traits(self) -> Traits:
        """See Strategy."""
        return Traits(
            cuts="the micro-batches of a step; the experts of mixtures",
            needs="at most as many processes as micro-batches; recipe.model.chunks, which the processes divide; a "
            "model with experts that are known, or recipe.model.plan; an optimizer that works element by element",
            communication="for each mixture and micro-batch the rows and what experts made of them, forward and "
            "backward; the sum of the other gradients once a step",
            cuts_rows=True,
            compiles=False,
        )

    def check(self, processes: int, microbatches: int) -> None:
        """Raise UsageError where some process would never have work."""
        check_work(processes, microbatches)

    def check_model(
        self, build: Callable[[], nn.Module], example: Inputs | None, processes: int, *, whole_blocks: bool = False
    ) -> None:
        """Raise UsageError where the model that `build` builds has no groups of experts for so many processes."""
        blank = on_meta(build)
        experts = expert_layers(blank)
        if cut_layers(blank) and not experts:
            raise UsageError(
                "strategy expert: the model has no experts that are known; say in recipe.model.plan which they are "
                "(docs/tensor-slicing.md#experts), or use strategy tensor, which shares the other layers"
            )
        check_shared(experts, processes, "expert")

    def mesh(self, processes: int) -> Mesh:
        """See Strategy."""
        return Mesh(expert=processes)

    def start(self, problem: Problem, make_optimizer: MakeOptimizer, world: World, numerics: Numerics) -> Engine:
        """Return the engine."""
        mesh, bucket_bytes = self.mesh(world.size), int(self.bucket_mib * 2**20)
        if world.size == 1:
            make_layout = replicated(world, mesh, bucket_bytes)
            return DataParallelEngine(problem, make_optimizer, world, numerics, mesh, make_layout)
        own = replace(problem, build_model=partial(own_experts, problem.build_model, world, mesh))
        make_layout = dispatched(world, mesh, bucket_bytes)
        return DataParallelEngine(own, make_optimizer, world, numerics, mesh, make_layout)
