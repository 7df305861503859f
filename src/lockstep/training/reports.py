"""The step reports of a training loop: loss, metrics and speed. A non-finite loss raises an error."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar, final

import torch
from torch import Tensor

from lockstep.comm.world import World
from lockstep.core.engine_recipe import make_nonfinite_advice
from lockstep.core.order import Step
from lockstep.core.several_losses import add_total, compute_loss_means, make_loss_sums
from lockstep.device.meter import SpeedMeter
from lockstep.parallel.engine import Sums
from lockstep.tasks.base import LOSS
from lockstep.training.digests import StepDigests
from lockstep.training.events import Stepped
from lockstep.training.plan import Plan
from lockstep.training.progress import Progress
from lockstep.training.turn import TrainingStep
from lockstep.training.watch import NonFiniteCheck

T = TypeVar("T")


@final
class StepReporter:
    """Makes the step reports of a training loop. All ranks must make the same calls."""

    def __init__(self, world: World, plan: Plan, progress: Progress, digests: StepDigests | None = None) -> None:
        self.world = world
        self.plan = plan
        self.progress = progress
        self.digests = digests
        self._nonfinite_check = NonFiniteCheck(
            world, plan.stop_on_nonfinite, make_nonfinite_advice(plan.recipe), digests
        )
        self._meter = SpeedMeter(world.device)
        self._last_step = -1  # number of the last step; keeping the step itself would keep its batch in memory

    def report(self, training_step: TrainingStep) -> Sequence[Stepped]:
        """Count a completed step, and return its report if one is due. A second call for a step is a no-op."""
        if training_step.step.number == self._last_step:
            return ()
        self._last_step = training_step.step.number
        assert training_step.sums is not None
        assert training_step.update is not None
        self._nonfinite_check.add(training_step.step, training_step.lr, training_step.sums)
        self._meter.add_step(training_step.step.samples, training_step.sums.weight)
        if not self.plan.should_report(training_step.step):
            return ()
        if self.digests is not None:
            self.digests.collect(only_if_enough=True)
        loss = self.check()
        speed = self._meter.read()
        stepped = Stepped(
            **self.progress.event_fields,
            loss=loss,
            lr=training_step.lr,
            norm=None if training_step.update.norm is None else float(training_step.update.norm),
            loss_scale=training_step.update.loss_scale,
            skipped_steps=self.progress.skipped_steps,
            samples_per_s=speed.samples_per_s,
            weight_per_s=speed.weight_per_s if self.plan.has_weights and training_step.step.weights is None else None,
            data_s=speed.data_s,
            peak_bytes=self._meter.get_peak_bytes(),
            figures=self._compute_metrics(training_step.step, training_step.sums),
        )
        return [stepped]

    def time_waits(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield the items of `batches`, and count the time spent waiting for them as data time."""
        return self._meter.measure_data_waits(batches)

    def check(self) -> float:
        """Return the loss of the last step. Raise TrainingError if any loss since the last check isn't finite."""
        return self._nonfinite_check.check()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Return a context manager that checks the losses, and excludes the `with` block from the reported speed."""
        self.check()
        yield
        self._meter.restart()

    def _compute_metrics(self, step: Step, sums: Sums) -> dict[str, float]:
        """Return the metrics of the task for a step, computed with the weights before the update.

        The total loss isn't included. If the task has several losses, the result contains the mean of each loss.
        """
        if self.plan.compute_metrics is None and not sums.named:
            return {}
        losses = compute_step_sums(sums)
        means = compute_loss_means(losses)
        if self.plan.compute_metrics is None:
            return means
        samples = torch.tensor(step.samples)
        figures = self.plan.compute_metrics({**losses, "samples": samples, **sums.of_task})
        return means | {name: figure for name, figure in figures.items() if name != LOSS.name}


def compute_step_sums(sums: Sums) -> Mapping[str, Tensor]:
    """Return the sums of the losses and weights of a step, on the CPU, named as in `compute_batch_sums`."""
    if not sums.named:
        return {"loss": sums.total.double().cpu(), "weight": torch.tensor(sums.weight)}
    losses = {name: loss.total.cpu() for name, loss in sums.named.items()}
    return add_total(make_loss_sums(losses, {name: loss.weight for name, loss in sums.named.items()}))
