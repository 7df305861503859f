"""Examines a step of a recipe: its micro-batches are run a second time under an observer.

This runs in a single process, with the random numbers of the step, and doesn't affect the step itself.
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
    """Wraps a task, and forwards all attributes to the task.

    If `see` is set, `loss` first calls `see` with the loss function of the task, the outputs and the batch.
    """

    def __init__(self, task: Task) -> None:
        self.see: Any = None
        self._task = task

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def loss(self, outputs: Any, batch: Batch) -> Loss:
        """See Task."""
        if self.see is not None:
            self.see(self._task.loss, outputs, batch)
        return self._task.loss(outputs, batch)


def examine(
    engine: Auditable,
    model: nn.Module,
    task: ObservedTask,
    microbatches: MicroBatches,
    step: Step,
    trace: Trace | None = None,
) -> StepObservations:
    """Run the micro-batches of a step again in a single process, and return the observations.

    The step itself isn't affected. `trace` records the tensors of the micro-batches, and the results of all modules and
    operations.
    """
    observations = StepObservations()
    for microbatch in microbatches:
        observer = Observer(microbatch, observations, trace)
        task.see = observer.note_losses
        try:
            with observer.observing(model):
                engine.repeat(replace(microbatch, note=lambda *_: None), step)
        finally:
            task.see = None
    return observations
