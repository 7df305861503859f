"""A step of the training loop, from the moment it is given out until its results are noted."""

import math
from dataclasses import dataclass

import torch

from lockstep.core.order import Step
from lockstep.parallel.engine import Sums, Update
from lockstep.tasks.base import MicroBatches
from lockstep.training.digests import StepDigests
from lockstep.training.progress import Progress


@dataclass(slots=True, eq=False)
class Turn:
    """A step to do now with this rank's micro-batches. Whoever iterates over `turns` does it, and notes the results."""

    step: Step
    microbatches: MicroBatches
    progress: Progress
    digests: StepDigests | None = None
    lr: float = math.nan
    sums: Sums | None = None  # None until the step is done
    update: Update | None = None

    def digest(self) -> None:
        """Note the digest of the step's first gradient, which is there now; all ranks call it before they update."""
        if self.digests is not None and self.sums is None:
            self.digests.add(self.step.number + 1)

    def done(self, lr: float, sums: Sums, update: Update) -> None:
        """Count the step as done at this learning rate, and note its results.

        A step may have several updates, each of other parameters. It is counted once, at the rate of the first. Its
        loss and norm are those of the last, but a loss that was not finite stays.
        """
        if self.sums is None or self.update is None:
            self.lr = lr
            self.progress.advance(self.step, update.applied)
        else:
            self.progress.skipped_steps += self.update.applied and not update.applied
            before = self.sums.total
            sums = sums._replace(total=torch.where(before.isfinite(), sums.total, before))
            update = update._replace(applied=self.update.applied and update.applied)
        self.sums, self.update = sums, update
