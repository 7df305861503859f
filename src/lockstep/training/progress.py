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
    def event_fields(self) -> dict[str, Any]:
        """The progress as keyword arguments for an event: `step`, `epoch` and `samples`."""
        return {"step": self.step, "epoch": self.epoch, "samples": self.samples}

    def record_evaluation(self, evaluation_result: Evaluated, monitor: Monitor) -> None:
        """Record the metrics of an evaluation, and whether it is the best evaluation so far.

        Evaluations are compared by the monitored metric and, if it is equal, by the loss.
        """
        self.figures = evaluation_result.figures
        if _sort_key(evaluation_result.figures, evaluation_result.loss, monitor) > _sort_key(
            self.best, self.best_loss, monitor
        ):
            self.best, self.best_loss, self.best_at = evaluation_result.figures, evaluation_result.loss, self.step


def _sort_key(metrics: dict[str, float], loss: float, monitor: Monitor) -> tuple[float, float]:
    """Return a sort key that is larger for a better evaluation, and lowest without the monitored metric."""
    value = metrics.get(monitor.name, loss if monitor.name == "loss" else math.nan)
    score = value if monitor.higher else -value
    return -math.inf if math.isnan(score) else score, -loss
