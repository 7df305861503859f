"""The engine and the loader of a rank."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import cast

from lockstep.comm.world import World
from lockstep.core.audit_schedule import AuditSchedule
from lockstep.data.loader import Loader
from lockstep.models.initialise import initialise
from lockstep.parallel.audited import AuditedEngine
from lockstep.parallel.engine import Auditable, Engine, Rotates
from lockstep.parallel.numerics import Numerics
from lockstep.parallel.rotated_audit import RotatedAudit
from lockstep.parallel.tensor.canonical_state import CanonicalState
from lockstep.setup.build import Setup
from lockstep.setup.prepare import Prepared
from lockstep.strategies.base import CutsModel


def start_engine(prepared: Prepared, world: World, resumes: bool = False) -> tuple[Engine, Loader]:
    """Start the engine that a placement asks for; return it and this rank's loader. All ranks call it.

    One that `resumes` will be given all weights: it needs none before.
    """
    ready, placement, strategy = prepared.ready, prepared.placement, prepared.strategy
    problem = ready.problem
    if resumes:
        problem = replace(problem, build_model=partial(initialise, ready.blank, ready.recipe.seed))
    numerics = replace(prepared.resolved.numerics, guarded=ready.guarded)
    mesh = strategy.mesh(world.size)
    own = mesh.data_rank(world.rank)
    start = partial(strategy.start, problem, ready.optimizer)
    if placement.audit_every is None:
        return _with_canonical_state(start(world, numerics), ready), ready.loader(world, own, placement.workers)
    schedule = AuditSchedule(placement.audit_every, mesh, ready.recipe.microbatches)
    # Where a rank cannot repeat one micro-batch of another by itself, all ranks do whole steps again in other places.
    if isinstance(strategy, CutsModel) or numerics.sync_batchnorm or numerics.recipe.model.sequence_chunks > 1:
        loader = ready.loader(world, own, placement.workers)
        moved = cast(Callable[[World, Numerics], Rotates], start)
        audited: Engine = RotatedAudit(moved, world, numerics, schedule, loader.microbatch)
    else:
        loader = ready.loader(world, own, placement.workers, partial(schedule.assignment, world.rank))
        own_start = cast(Callable[[World], Auditable], lambda world: start(world, numerics))
        audited = AuditedEngine(own_start, world, schedule, loader.microbatch)
    return _with_canonical_state(audited, ready), loader


def _with_canonical_state(engine: Engine, ready: Setup) -> Engine:
    return CanonicalState(engine, ready.chunked) if ready.chunked else engine
