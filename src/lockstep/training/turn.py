"""A step of the training loop, and its results once the step has run."""

import math
from dataclasses import dataclass

import torch

from lockstep.core.order import Step
from lockstep.parallel.engine import Sums, Update
from lockstep.tasks.base import MicroBatches
from lockstep.training.digests import StepDigests
from lockstep.training.progress import Progress


@dataclass(slots=True, eq=False)
class TrainingStep:
    """The next step to run, with the micro-batches of this rank.

    `iterate_training_steps` yields it. The caller runs the step, and passes its results to `record_update`.
    """

    step: Step
    microbatches: MicroBatches
    progress: Progress
    digests: StepDigests | None = None
    lr: float = math.nan
    sums: Sums | None = None  # None until the step has run
    update: Update | None = None

    def record_digest(self) -> None:
        """Record the digest of the first gradient of the step, before the update. All ranks call it."""
        if self.digests is not None and self.sums is None:
            self.digests.add(self.step.number + 1)

    def record_update(self, lr: float, sums: Sums, update: Update) -> None:
        """Record the results of an update at learning rate `lr`, and count the step as complete.

        A step may have several updates, which change different parameters. In this case, the step counts once, at the
        learning rate of the first update. The loss and the norm are those of the last update, but a non-finite loss of
        an earlier update is kept.
        """
        if self.sums is None or self.update is None:
            self.lr = lr
            self.progress.advance(self.step, update.applied)
        else:
            self.progress.skipped_steps += self.update.applied and not update.applied
            total_before = self.sums.total
            sums = sums._replace(total=torch.where(total_before.isfinite(), sums.total, total_before))
            update = update._replace(applied=self.update.applied and update.applied)
        self.sums, self.update = sums, update
