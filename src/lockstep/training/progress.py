"""The progress of a run, and its best evaluation."""

import math
from dataclasses import dataclass, field
from typing import Any

from lockstep.core.order import Step
from lockstep.tasks.base import Monitor
from lockstep.training.events import Evaluated


@dataclass
class Progress:
    """The progress of a run: the part of a checkpoint that isn't the state of the engine."""

    step: int = 0  # number of completed steps
    epoch: int = 0
    samples: int = 0  # number of training samples seen
    skipped_steps: int = 0
    figures: dict[str, float] = field(default_factory=dict)  # metrics of the last evaluation
    best: dict[str, float] = field(default_factory=dict)  # metrics of the best evaluation
    best_loss: float = math.inf
    best_at: int = -1  # step of the best evaluation

    def advance(self, step: Step, applied: bool) -> None:
        """Record that `step` is complete. `applied` is whether the optimizer applied the update."""
        self.step = step.number + 1
        self.epoch = step.epoch
        self.samples = step.samples_seen + step.samples
        self.skipped_steps += not applied

    @property
    def at(self) -> dict[str, Any]:
        """The progress, as the fields that all events have."""
        return {"step": self.step, "epoch": self.epoch, "samples": self.samples}

    def judge(self, evaluated: Evaluated, monitor: Monitor) -> None:
        """Record an evaluation. It becomes the best if its monitored metric is better, or equal with a lower loss."""
        self.figures = evaluated.figures
        if _rank(evaluated.figures, evaluated.loss, monitor) > _rank(self.best, self.best_loss, monitor):
            self.best, self.best_loss, self.best_at = evaluated.figures, evaluated.loss, self.step


def _rank(figures: dict[str, float], loss: float, monitor: Monitor) -> tuple[float, float]:
    """Return a sort key that is larger for better evaluations. Evaluations without the monitored metric come last."""
    value = figures.get(monitor.name, loss if monitor.name == "loss" else math.nan)
    goodness = value if monitor.higher else -value
    return -math.inf if math.isnan(goodness) else goodness, -loss
