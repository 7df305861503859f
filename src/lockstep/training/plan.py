"""The plan of a training loop: its steps and learning rate, and when it reports, evaluates and saves."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from lockstep.core.engine_recipe import EngineRecipe
from lockstep.core.order import Step, Steps
from lockstep.core.rate import Rate
from lockstep.tasks.base import LOSS, Figures, Monitor


@dataclass(frozen=True, slots=True)
class Interval:
    """An interval: every so many steps, or at the end of every so many epochs."""

    steps: int | None = None
    epochs: int | None = None

    def falls_on(self, step: Step) -> bool:
        """Whether something is due once `step` is done."""
        if self.steps is not None:
            return (step.number + 1) % self.steps == 0
        return step.last_of_epoch and self.epochs is not None and (step.epoch + 1) % self.epochs == 0


NEVER: Final = Interval(steps=1 << 62)


@dataclass(frozen=True, slots=True)
class Plan:
    """What the loop follows: steps, learning rate, and the intervals of reporting, evaluating and saving."""

    steps: Steps
    rate: Rate | None  # None: whoever does the steps knows it, and the recipe too
    monitor: Monitor = LOSS
    figures: Callable[[Mapping[str, Tensor]], Figures] | None = None  # of a step that is reported, from its sums
    weighs: bool = False  # whether a step weighs something else than its samples, whose speed is reported too
    recipe: EngineRecipe | None = None
    stop_on_nonfinite: bool = True
    log: Interval = Interval(steps=10)
    evaluate: Interval | None = Interval(epochs=1)  # None where there is nothing to evaluate on
    save: Interval = Interval(epochs=1)

    def reports(self, step: Step) -> bool:
        """Whether a step is reported: the last one always is."""
        return step.number + 1 == self.steps.total or self.log.falls_on(step)
