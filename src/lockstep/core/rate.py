"""The learning rate as a function of the number of samples seen, not of the number of optimizer steps.

The learning rate follows one of five curves or a custom function. During warm-up, it is multiplied by a factor that
increases linearly from `warmup_factor` to 1 (Goyal et al. 2017, section 2.2). Time is measured in epochs: samples seen
divided by samples per epoch. If the recipe sets one learning rate per epoch, the time is rounded down.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Curve = Literal["cosine", "linear", "polynomial", "steps", "constant"]
RateCurve = Callable[[float, float], float]  # (epoch, number of epochs) -> nonnegative factor of the base rate


@dataclass(frozen=True, slots=True)
class RateSchedule:
    """A learning rate schedule.

    - `epochs`: the length of the run in epochs, which can be a fraction.
    - `minimum`: the final learning rate of a decreasing curve, or the learning rate of a `RateCurve` when its factor is
      0.
    - `milestones`: the curve `steps` multiplies the learning rate by `gamma` at each of these epochs.
    """

    base: float
    samples_per_epoch: int
    epochs: float
    curve: Curve | RateCurve = "constant"
    minimum: float = 0.0
    power: float = 1.0
    milestones: tuple[float, ...] = ()
    gamma: float = 0.1
    warmup_epochs: float = 0.0
    warmup_factor: float = 0.1
    update_interval: Literal["step", "epoch"] = "step"

    def compute_rate(self, samples_seen: int) -> float:
        """Return the learning rate for the update that follows `samples_seen` samples."""
        epoch = samples_seen / self.samples_per_epoch
        if self.update_interval == "epoch":
            epoch = math.floor(epoch)
        return self._compute_decayed_rate(epoch) * self._compute_warmup_factor(epoch)

    def _compute_decayed_rate(self, epoch: float) -> float:
        progress = min(epoch / self.epochs, 1.0)
        match self.curve:
            case "constant":
                return self.base
            case "steps":
                return self.base * self.gamma ** sum(epoch >= milestone for milestone in self.milestones)
            case "cosine":
                factor = 0.5 * (1.0 + math.cos(math.pi * progress))
            case "linear":
                factor = 1.0 - progress
            case "polynomial":
                factor = (1.0 - progress) ** self.power
            case shape:
                factor = shape(epoch, self.epochs)
        return self.minimum + (self.base - self.minimum) * factor

    def _compute_warmup_factor(self, epoch: float) -> float:
        if epoch >= self.warmup_epochs:
            return 1.0
        progress = epoch / self.warmup_epochs
        return self.warmup_factor * (1.0 - progress) + progress


def scale_rate(rate: float, reference_batch_size: int | None, batch_size: int) -> float:
    """Return the base learning rate, scaled linearly with the batch size if a reference batch size is set."""
    return rate if reference_batch_size is None else rate * batch_size / reference_batch_size
