"""The events of a run that say what it is and how well it does, from what the run was made of."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from lockstep.comm.world import World
from lockstep.common.hashing import hash_seed
from lockstep.config import plan as planning
from lockstep.core.order import Steps
from lockstep.core.precision import Precision
from lockstep.data.loader import Loader
from lockstep.device.peak import peak_flops
from lockstep.parallel.engine import Engine
from lockstep.run.rank import Rank
from lockstep.setup.build import Setup, evaluation_batch
from lockstep.setup.prepare import Prepared
from lockstep.tasks.base import Report
from lockstep.training.evaluate import LOSS, evaluate, figures_of
from lockstep.training.events import Evaluated, Started
from lockstep.training.progress import Progress


def start_event(prepared: Prepared, rank: Rank, resumed_from: Path | None) -> Started:
    """Return the first event of a run of a recipe. All ranks call it."""
    recipe, ready = prepared.recipe, prepared.ready
    task, data = ready.task, ready.data
    loop = loop_start_event(
        rank,
        ready.steps,
        resumed_from,
        microbatches=recipe.microbatches,
        strategy=prepared.resolved.strategy_name,
        parameters=ready.summary.parameters,
        base_lr=planning.base_rate(recipe),
    )
    return replace(
        loop,
        validation_samples=0 if data.validation is None else len(data.validation),
        task=ready.task_line,
        monitor=task.monitor.name,
        higher=task.monitor.higher,
        unit=task.unit,
        fractions=list(task.fractions),
        flops_per_sample=ready.summary.flops,
        peak_flops_per_s=_peak_flops_per_s(rank.world, recipe.precision),
    )


def loop_start_event(
    rank: Rank,
    steps: Steps,
    resumed_from: Path | None,
    *,
    microbatches: int,
    strategy: str,
    parameters: int,
    base_lr: float,
) -> Started:
    """Return the first event of a loop, its steps alone."""
    world, progress = rank.world, rank.progress
    return Started(
        **progress.at,
        steps=steps.total,
        epochs=steps.total_samples / steps.samples_per_epoch,
        steps_per_epoch=steps.per_epoch,
        train_samples=steps.length,
        validation_samples=0,
        batch=steps.batch,
        microbatches=microbatches,
        processes=world.size,
        strategy=strategy,
        device=str(world.device),
        parameters=parameters,
        base_lr=base_lr,
        resumed_from=str(resumed_from) if resumed_from else None,
        again=max(0, rank.last_step() - progress.step),
        backend=world.backend if world.size > 1 else "",
        sharing=world.sharing,
        hash_seed=hash_seed(),
    )


def evaluation_event(
    engine: Engine,
    world: World,
    ready: Setup,
    loader: Loader,
    progress: Progress,
    keep: Callable[[Report], None] | None = None,
) -> Evaluated:
    """Evaluate exactly and return the event; `keep` gets what the task reports in detail. All ranks call it."""
    task, batch = ready.task, evaluation_batch(ready.recipe)
    batches, count = loader.validation(batch), loader.validation_batches(batch)
    sums, seconds = evaluate(engine, world, task, batches, count, details=keep is not None)
    figures = figures_of(task, sums)
    if keep is not None:
        keep(task.report(sums))
    return Evaluated(
        **progress.at,
        loss=figures.pop(LOSS),
        figures=figures,
        evaluated=int(sums.get("counted", sums["samples"])),
        of=0 if ready.data.validation is None else len(ready.data.validation),
        seconds=seconds,
        fractions=list(task.fractions),
        weights="ema" if ready.recipe.ema else "model",
    )


def _peak_flops_per_s(world: World, precision: Precision) -> float | None:
    """Return what all cards of the run could do, in FLOP/s; None on the CPU and on cards whose peak is not known.

    Ranks may share a card. All ranks call it.
    """
    if not world.on_gpu:
        return None
    properties = torch.cuda.get_device_properties(world.device)
    cards = set(world.all_tell(str(properties.uuid)))
    peak = peak_flops(properties.name, precision)
    return None if peak is None else peak * len(cards)
