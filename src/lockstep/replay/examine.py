"""Examines a step of a recipe by running its micro-batches a second time with an observer.

The second run uses a single process and the random numbers of the step, and doesn't affect the step.
"""

from dataclasses import replace
from typing import Any, final

from torch import nn

from lockstep.core.batch import Batch
from lockstep.core.order import Step
from lockstep.core.several_losses import Loss
from lockstep.parallel.engine import Auditable
from lockstep.replay.trace import Trace
from lockstep.tasks.base import MicroBatches, Task
from lockstep.training.observer import Observer, StepObservations


@final
class ObservedTask:
    """Wraps a task so that an observer sees its losses. All other attributes are those of the task.

    If `on_loss` is set, `loss` first calls it with the loss function of the task, the outputs and the batch.
    """

    def __init__(self, task: Task) -> None:
        self.on_loss: Any = None
        self._task = task

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def loss(self, outputs: Any, batch: Batch) -> Loss:
        """See Task."""
        if self.on_loss is not None:
            self.on_loss(self._task.loss, outputs, batch)
        return self._task.loss(outputs, batch)


def observe_step(
    engine: Auditable,
    model: nn.Module,
    task: ObservedTask,
    microbatches: MicroBatches,
    step: Step,
    trace: Trace | None = None,
) -> StepObservations:
    """Run the micro-batches of a step again in a single process, and return the observations.

    This doesn't affect the step. If `trace` is passed, the tensors of the micro-batches and the results of all modules
    and operations are added to it.
    """
    observations = StepObservations()
    for microbatch in microbatches:
        observer = Observer(microbatch, observations, trace)
        task.on_loss = observer.record_losses
        try:
            with observer.observing(model):
                engine.repeat(replace(microbatch, record_tensor=lambda *_: None), step)
        finally:
            task.on_loss = None
    return observations
