"""Creates the start event and the evaluation events of a recipe."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from lockstep.comm.world import World
from lockstep.config import plan as planning
from lockstep.core.precision import Precision
from lockstep.data.loader import Loader
from lockstep.device.peak import find_peak_flops
from lockstep.parallel.engine import Engine
from lockstep.run.rank import Rank
from lockstep.run.start_event import make_loop_start_event
from lockstep.setup.build import Setup, get_evaluation_batch_size
from lockstep.setup.prepare import PreparedRun
from lockstep.strategies.base import replica_devices
from lockstep.tasks.base import TaskReport
from lockstep.training.evaluate import LOSS, compute_task_metrics, evaluate
from lockstep.training.events import Evaluated, Started
from lockstep.training.progress import Progress


def make_start_event(prepared: PreparedRun, rank: Rank, resumed_from: Path | None) -> Started:
    """Return the Started event of a run. All ranks must call it."""
    recipe, ready = prepared.recipe, prepared.setup
    task, data = ready.task, ready.data
    loop = make_loop_start_event(
        rank,
        ready.steps,
        resumed_from,
        microbatches=recipe.microbatches,
        strategy=prepared.resolved.strategy_name,
        parameters=ready.summary.num_parameters,
        base_lr=planning.compute_base_rate(recipe),
        replicas=replica_devices(prepared.strategy, rank.world.on_gpu),
    )
    return replace(
        loop,
        validation_samples=0 if data.validation is None else len(data.validation),
        task=ready.task_description,
        monitor=task.monitor.name,
        higher=task.monitor.higher,
        unit=task.unit,
        fractions=list(task.fractions),
        flops_per_sample=ready.summary.flops,
        peak_flops_per_s=_compute_peak_flops_per_s(rank.world, recipe.precision),
    )


def make_evaluation_event(
    engine: Engine,
    world: World,
    setup: Setup,
    loader: Loader,
    progress: Progress,
    write_report: Callable[[TaskReport], None] | None = None,
) -> Evaluated:
    """Evaluate the model on all validation samples, and return the Evaluated event. All ranks must call it.

    If `write_report` is set, it is called with the detailed report of the task.
    """
    task, batch = setup.task, get_evaluation_batch_size(setup.recipe)
    batches, count = loader.iterate_validation_batches(batch), loader.count_validation_batches(batch)
    sums, seconds = evaluate(engine, world, task, batches, count, details=write_report is not None)
    figures = compute_task_metrics(task, sums)
    if write_report is not None:
        write_report(task.report(sums))
    return Evaluated(
        **progress.event_fields,
        loss=figures.pop(LOSS),
        figures=figures,
        evaluated=int(sums.get("counted", sums["samples"])),
        of=0 if setup.data.validation is None else len(setup.data.validation),
        seconds=seconds,
        fractions=list(task.fractions),
        weights="ema" if setup.recipe.ema else "model",
    )


def _compute_peak_flops_per_s(world: World, precision: Precision) -> float | None:
    """Return the total peak FLOP/s of all GPUs. Return None on the CPU, or if the peak of the GPU is unknown.

    A GPU that is shared by several ranks counts once. All ranks must call it.
    """
    if not world.on_gpu:
        return None
    properties = torch.cuda.get_device_properties(world.device)
    cards = set(world.all_gather_text(str(properties.uuid)))
    peak = find_peak_flops(properties.name, precision)
    return None if peak is None else peak * len(cards)
