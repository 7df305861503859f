"""Finds the learning rate schedule of a recipe: a built-in schedule, or a custom function `package.module:function`."""

import math
from collections.abc import Callable
from numbers import Real
from typing import Final

from lockstep.common.importing import import_callable
from lockstep.common.user_code import UserCode
from lockstep.config import plan as planning
from lockstep.config.recipe import Recipe
from lockstep.core.order import Steps
from lockstep.core.rate import RateCurve, RateSchedule
from lockstep.errors import UsageError

_NUM_CHECKED_STEPS: Final = 1_000  # number of steps at which a custom schedule is checked
_DOCS_HINT: Final = "see docs/extend.md"


def find_rate(recipe: Recipe, steps: Steps) -> RateSchedule:
    """Return the learning rate as a function of the number of samples seen.

    A custom schedule is a function `(epoch, epochs, **options) -> factor`. The base learning rate is multiplied by the
    factor. If the function raises an error or returns an invalid factor, `RateSchedule.compute_rate` raises UsageError.
    """
    name = recipe.schedule.name
    return planning.make_rate(recipe, steps, _make_custom_curve(recipe) if ":" in name else None)


def check_rate(recipe: Recipe, steps: Steps) -> None:
    """Raise UsageError if a custom schedule fails, or returns a different rate when it is called again for a step.

    The schedule is called for up to 1,000 steps in increasing and then in decreasing order, because its result must not
    depend on earlier calls: a resumed run skips the earlier steps.
    """
    if ":" not in recipe.schedule.name:
        return
    rate = find_rate(recipe, steps)
    step_numbers = sorted(
        {round(fraction * (steps.total - 1) / _NUM_CHECKED_STEPS) for fraction in range(_NUM_CHECKED_STEPS + 1)}
    )
    samples_seen = [steps[step].samples_seen for step in step_numbers]
    values = [rate.compute_rate(samples) for samples in samples_seen]
    for step, samples, value in zip(reversed(step_numbers), reversed(samples_seen), reversed(values), strict=True):
        if rate.compute_rate(samples) != value:
            raise UsageError(
                f"schedule {recipe.schedule.name}: returned a different rate when called again for step {step + 1}; "
                f"compute it only from the arguments, because a resumed run skips the earlier steps ({_DOCS_HINT})"
            )


def _make_custom_curve(recipe: Recipe) -> RateCurve:
    path, options = recipe.schedule.name, recipe.schedule.options
    function: Callable[..., object] = import_callable(path, "schedule", f"a function ({_DOCS_HINT})")
    code = UserCode(f"schedule {path}")

    def compute_factor(epoch: float, epochs: float) -> float:
        with code:
            result = function(epoch, epochs, **options)
        if not isinstance(result, Real) or not math.isfinite(result) or result < 0:
            value = result if isinstance(result, Real) else f"{type(result).__name__}"
            raise UsageError(
                f"schedule {path}: returned {value} at epoch {epoch:g} of {epochs:g}; return a finite number, 0 or more"
            )
        return float(result)

    return compute_factor
