"""The plan of a training loop: which steps it runs, and when it reports, evaluates and saves."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from lockstep.core.engine_recipe import EngineRecipe
from lockstep.core.order import Step, Steps
from lockstep.core.rate import RateSchedule
from lockstep.tasks.base import LOSS, MetricValues, Monitor


@dataclass(frozen=True, slots=True)
class Interval:
    """An interval of `steps` steps, or of `epochs` epochs."""

    steps: int | None = None
    epochs: int | None = None

    def falls_on(self, step: Step) -> bool:
        """Return whether the interval ends with `step`."""
        if self.steps is not None:
            return (step.number + 1) % self.steps == 0
        return step.last_of_epoch and self.epochs is not None and (step.epoch + 1) % self.epochs == 0


NEVER: Final = Interval(steps=1 << 62)


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a training loop: its steps, learning rates, and intervals of reports, evaluations and saves."""

    steps: Steps
    rate: RateSchedule | None  # None if the caller of the loop sets the learning rate
    monitor: Monitor = LOSS
    # Computes the metrics of a step from its sums.
    compute_metrics: Callable[[Mapping[str, Tensor]], MetricValues] | None = None
    # Whether weights and sample counts differ. If so, reports also contain the speed in weight per second.
    has_weights: bool = False
    recipe: EngineRecipe | None = None
    stop_on_nonfinite: bool = True
    log: Interval = Interval(steps=10)
    evaluate: Interval | None = Interval(epochs=1)  # None if there is no validation split
    save: Interval = Interval(epochs=1)

    def should_report(self, step: Step) -> bool:
        """Return whether `step` is reported. The last step always is."""
        return step.number + 1 == self.steps.total or self.log.falls_on(step)
