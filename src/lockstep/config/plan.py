"""Computes the steps and the learning rate schedule of a run from the recipe and the number of training samples."""

import math
from typing import cast

from lockstep.config.recipe import Recipe
from lockstep.core.order import Steps
from lockstep.core.rate import Curve, RateCurve, RateSchedule, scale_rate
from lockstep.errors import UsageError


def compute_steps(recipe: Recipe, num_samples: int) -> Steps:
    """Return the steps of a run on a dataset with `num_samples` training samples.

    Raises UsageError if `last_batch` is `drop` and there are fewer samples than the batch size.
    """
    drop = recipe.last_batch == "drop"
    if drop and num_samples < recipe.batch:
        raise UsageError(
            f"recipe.batch: {num_samples} training samples do not fill a batch of {recipe.batch}, "
            f"so recipe.last_batch=drop drops all of them; use a batch of at most {num_samples}, or set "
            f"recipe.last_batch=keep"
        )
    return Steps(num_samples, recipe.batch, drop, recipe.epochs, recipe.steps)


def compute_base_rate(recipe: Recipe) -> float:
    """Return the base learning rate, which applies after the warm-up and before the decay."""
    lr = recipe.optimizer.lr
    return scale_rate(lr.value, lr.per_samples, recipe.batch)


def format_base_rate(recipe: Recipe) -> str:
    """Return the formula of the base learning rate as text, such as `0.2 = 0.1 x 256 / 128`."""
    lr = recipe.optimizer.lr
    base = f"{compute_base_rate(recipe):g}"
    return base if lr.per_samples is None else f"{base} = {lr.value:g} x {recipe.batch} / {lr.per_samples}"


def count_warm_up_steps(recipe: Recipe, steps: Steps) -> int:
    """Return the number of warm-up steps."""
    if recipe.schedule.warmup_steps is not None:
        return recipe.schedule.warmup_steps
    warmup = recipe.schedule.warmup_epochs
    epochs, fraction = divmod(math.ceil(warmup) if recipe.schedule.each == "epoch" else warmup, 1)
    return int(epochs) * steps.per_epoch + math.ceil(fraction * steps.samples_per_epoch / steps.batch)


def make_rate(recipe: Recipe, steps: Steps, custom_schedule: RateCurve | None = None) -> RateSchedule:
    """Return the learning rate as a function of the number of samples seen.

    If `custom_schedule` is set, it replaces the schedule that the recipe names.
    """
    schedule, warmup_epochs = recipe.schedule, recipe.schedule.warmup_epochs
    if schedule.warmup_steps is not None:
        warmup_epochs = steps[schedule.warmup_steps].samples_seen / steps.samples_per_epoch
    return RateSchedule(
        base=compute_base_rate(recipe),
        samples_per_epoch=steps.samples_per_epoch,
        epochs=steps.total_samples / steps.samples_per_epoch,
        curve=custom_schedule or cast(Curve, schedule.name),
        minimum=schedule.min_lr,
        power=schedule.power,
        milestones=schedule.milestones,
        gamma=schedule.gamma,
        warmup_epochs=warmup_epochs,
        warmup_factor=schedule.warmup_factor,
        update_interval=schedule.each,
    )
