"""Creates the first event of a run, which describes its steps and its placement."""

from collections.abc import Sequence
from pathlib import Path

import torch

from lockstep.common.hashing import get_hash_seed
from lockstep.core.order import Steps
from lockstep.run.rank import Rank
from lockstep.training.events import Started


def make_loop_start_event(
    rank: Rank,
    steps: Steps,
    resumed_from: Path | None,
    *,
    microbatches: int,
    strategy: str,
    parameters: int,
    base_lr: float,
    replicas: Sequence[torch.device] = (),
) -> Started:
    """Return the Started event of a recipe or custom training loop, without the fields that only a recipe has.

    `replicas` holds the device of each model replica, for strategies with several replicas per process.
    """
    world, progress = rank.world, rank.progress
    return Started(
        **progress.event_fields,
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
        again=max(0, rank.find_last_step() - progress.step),
        backend=world.backend if world.size > 1 else "",
        sharing=world.device_sharing_groups,
        replicas=[str(device) for device in replicas],
        hash_seed=get_hash_seed(),
    )
