"""Checks the loss of every step for non-finite values, without synchronizing with the device in every step."""

import math
from typing import final

import torch

from lockstep.comm.world import World
from lockstep.core.order import Step
from lockstep.errors import TrainingError
from lockstep.parallel.engine import Sums
from lockstep.training.digests import StepDigests


@final
class NonFiniteCheck:
    """Collects the losses of steps. If `stop` is set, a non-finite loss raises an error that ends with `advice`."""

    def __init__(self, world: World, stop: bool, advice: str, digests: StepDigests | None = None) -> None:
        self._world = world
        self._digests = digests
        self._stop = stop
        self._advice = advice
        self._unchecked: list[tuple[Step, float, Sums]] = []
        self._last_loss = math.nan

    def add(self, step: Step, lr: float, sums: Sums) -> None:
        """Add the losses of `step`, which was taken at learning rate `lr`."""
        self._unchecked.append((step, lr, sums))

    def check(self) -> float:
        """Check all losses since the last check, and return the loss of the last step. All ranks call it.

        If a loss isn't finite and `stop` is set, raises TrainingError. The error names the first such step, and the
        ranks whose micro-batches caused it.
        """
        if self._unchecked:
            totals = torch.stack([sums.total for _, _, sums in self._unchecked]).tolist()
            # A step with weight 0 has no losses and no update. The sum of its losses is 0, which isn't a valid loss.
            losses = [total / max(sums.weight, 1) for total, (_, _, sums) in zip(totals, self._unchecked, strict=True)]
            self._last_loss = losses[-1]
            if self._stop:
                for loss, (step, lr, sums) in zip(losses, self._unchecked, strict=True):
                    if not math.isfinite(loss):
                        if self._digests is not None:
                            # Write the digests up to this step, so that a user can inspect them.
                            self._digests.collect()
                        raise TrainingError(self._describe_nonfinite_loss(loss, step, lr, sums))
            self._unchecked.clear()
        return self._last_loss

    def _describe_nonfinite_loss(self, loss: float, step: Step, lr: float, sums: Sums) -> str:
        nonfinite = torch.zeros(self._world.size, dtype=torch.int64)
        nonfinite[self._world.rank] = not all(bool(torch.isfinite(loss).all()) for loss in sums.local_losses)
        ranks = self._world.add_(nonfinite).nonzero().flatten().tolist()
        source = f"rank {', '.join(map(str, ranks))}" if ranks else "the sum over all ranks"
        return (
            f"loss is {loss} at step {step.number + 1} (epoch {step.epoch + 1}), on {source}, "
            f"at learning rate {lr:.6g}; {self._advice}"
        )
