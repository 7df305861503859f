"""Validates the arguments of `step.update`: the learning rate, the clipping norm and the optimizer groups."""

import math
from typing import NamedTuple

from lockstep.common.user_code import make_refusal
from lockstep.loop.distributed_model import PlacedModel

__tracebackhide__ = True  # let pytest hide these frames, so that it shows the line of user code


class UpdateSettings(NamedTuple):
    """The settings of an update.

    - `rate`: The learning rate to pass to the engine. If a scheduler sets the rates of groups, it is 1.
    - `reported_rate`: The learning rate to report.
    - `clip`: The gradient norm to clip to, or None.
    - `groups`: The indices of the groups to update, or None for all groups.
    """

    rate: float
    reported_rate: float
    clip: float | None
    groups: frozenset[int] | None


def make_update_settings(
    step: int, placed: PlacedModel, lr: float | None, clip: float | None, group_name: str | None, *, audited: bool
) -> UpdateSettings:
    """Validate the arguments of `step.update`. Raises UsageError if an argument is invalid.

    `audited` is whether the step is audited.
    """
    scheduler = placed.scheduler
    if scheduler is not None and lr is not None:
        raise make_refusal(
            f"step {step}: got lr={lr!r}, but a scheduler sets the learning rate", "remove lr=, or the scheduler"
        )
    rate = placed.rate if lr is None else _validate_lr(step, lr)
    reported_rate, rate = (rate, rate) if scheduler is None else (scheduler.rate, 1.0)
    groups = None if group_name is None else _find_group_indices(step, placed, group_name, audited)
    return UpdateSettings(rate, reported_rate, None if clip is None else _validate_clip_norm(step, clip), groups)


def _validate_clip_norm(step_number: int, value: object) -> float:
    number = _to_float(value)
    if not number > 0:  # clipping to 0 would stop training, and a negative norm would reverse the gradient
        raise make_refusal(f"step {step_number}: got clip={value!r}", "pass a norm above 0, or remove clip=")
    return number


def _validate_lr(step_number: int, value: object) -> float:
    number = _to_float(value)
    if not 0 <= number < math.inf:
        raise make_refusal(f"step {step_number}: got lr={value!r}", "pass a finite learning rate of at least 0")
    return number


def _to_float(value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):  # raised for a tensor with several values
        return math.nan


def _find_group_indices(step: int, placed: PlacedModel, group_name: str, audited: bool) -> frozenset[int]:
    """Return the indices of the groups named `group_name`. Raises UsageError if a partial update isn't supported."""
    reasons = {
        "in an audited step": audited,
        "with ema": placed.numerics.ema_decay is not None,
        "with compressed gradients, which carry residuals of all groups over to later steps": placed.engine.compresses,
    }
    if problem := next((reason for reason, applies in reasons.items() if applies), ""):
        raise make_refusal(
            f"step {step}: step.update(of=...) is not supported {problem}", "update all groups together, without of="
        )
    return placed.groups.get_indices(group_name)
