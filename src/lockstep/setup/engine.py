"""Starts the engine and the data loader of a rank."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import cast

from lockstep.comm.world import World
from lockstep.core.audit_schedule import AuditSchedule
from lockstep.data.loader import Loader
from lockstep.models.initialization import initialize_model
from lockstep.parallel.audited import AuditedEngine
from lockstep.parallel.engine import Auditable, Engine, RotatableEngine
from lockstep.parallel.numerics import Numerics
from lockstep.parallel.rotated_audit import RotatedAudit
from lockstep.parallel.tensor.canonical_state import CanonicalState
from lockstep.setup.build import Setup
from lockstep.setup.checks import needs_full_tensors
from lockstep.setup.prepare import PreparedRun
from lockstep.strategies.base import PartitionedModelStrategy, replica_devices


def start_engine(prepared: PreparedRun, world: World, is_resumed: bool = False) -> tuple[Engine, Loader]:
    """Start the engine of this rank, and return it together with the data loader. All ranks must call this function.

    If `is_resumed` is set, the initial weights aren't loaded, because the caller will load the weights of a checkpoint.
    """
    setup, placement, strategy = prepared.setup, prepared.placement, prepared.strategy
    problem = setup.problem
    if is_resumed:
        problem = replace(problem, build_model=partial(initialize_model, setup.build_blank, setup.recipe.seed))
    requires_full_tensors = needs_full_tensors(prepared.resolved, setup)
    numerics = replace(
        prepared.resolved.numerics,
        checks_writes=setup.is_guarded,
        needs_full_tensors=requires_full_tensors,
        chunked_parameters=setup.chunk_layouts,
    )
    mesh = strategy.mesh(world.size)
    data_rank = mesh.get_data_rank(world.rank)
    start = partial(strategy.start, problem, setup.make_optimizer)
    if placement.audit_every is None:
        engine, devices = start(world, numerics), replica_devices(strategy, world.on_gpu)
        return _wrap_canonical_state(engine, setup), setup.make_loader(
            world, data_rank, placement.workers, devices=devices
        )
    schedule = AuditSchedule(placement.audit_every, mesh, setup.recipe.microbatches)
    # Usually, each rank repeats a micro-batch of a different rank in an audit. With the settings below, a rank can't
    # run a micro-batch on its own, so the audit repeats the full step with the ranks rotated.
    if (
        isinstance(strategy, PartitionedModelStrategy)
        or numerics.sync_batchnorm
        or numerics.recipe.model.sequence_chunks > 1
    ):
        loader = setup.make_loader(world, data_rank, placement.workers)
        start_rotated = cast(Callable[[World, Numerics], RotatableEngine], start)
        audited: Engine = RotatedAudit(start_rotated, world, numerics, schedule, loader.fetch_microbatch)
    else:
        loader = setup.make_loader(world, data_rank, placement.workers, partial(schedule.get_assignment, world.rank))
        start_alone = cast(Callable[[World], Auditable], lambda world: start(world, numerics))
        audited = AuditedEngine(start_alone, world, schedule, loader.fetch_microbatch)
    return _wrap_canonical_state(audited, setup), loader


def _wrap_canonical_state(engine: Engine, setup: Setup) -> Engine:
    return CanonicalState(engine, setup.chunk_layouts) if setup.chunk_layouts else engine
