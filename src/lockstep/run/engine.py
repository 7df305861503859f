"""The engine and the loader of a rank."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import cast

from lockstep.comm.world import World
from lockstep.core.audit_schedule import AuditSchedule
from lockstep.data.loader import Loader
from lockstep.models.initialise import initialise
from lockstep.parallel.audited import AuditedEngine
from lockstep.parallel.engine import Auditable, Engine
from lockstep.parallel.tensor.canonical_state import CanonicalState
from lockstep.run.build import Setup
from lockstep.run.resolved import Resolved
from lockstep.run.strategy import recompute_interval


def start_engine(ready: Setup, resolved: Resolved, world: World, resumes: bool = False) -> tuple[Engine, Loader]:
    """Start the engine that a placement asks for; return it and this rank's loader. All ranks call it.

    One that `resumes` will be given all weights: it needs none before.
    """
    placement, strategy = resolved.placement, resolved.strategy
    problem = ready.problem
    if resumes:
        problem = replace(problem, build_model=partial(initialise, ready.blank, ready.recipe.seed))
    numerics = ready.numerics(placement.offload_activations, recompute_interval(placement, strategy))
    engine = strategy.start(problem, ready.optimizer, world, numerics)
    mesh = strategy.mesh(world.size)
    own = mesh.data_rank(world.rank)
    if placement.audit_every is None:
        return _with_canonical_state(engine, ready), ready.loader(world, own, placement.workers)
    schedule = AuditSchedule(placement.audit_every, mesh, ready.recipe.microbatches)
    loader = ready.loader(world, own, placement.workers, partial(schedule.assignment, world.rank))
    return _with_canonical_state(
        AuditedEngine(cast(Auditable, engine), world, schedule, loader.microbatch), ready
    ), loader


def _with_canonical_state(engine: Engine, ready: Setup) -> Engine:
    return CanonicalState(engine, ready.chunked) if ready.chunked else engine
