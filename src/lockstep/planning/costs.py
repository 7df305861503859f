"""Estimates costs of a placement from its step time: the price of devices, and the time lost to saves and failures."""

import math
from dataclasses import dataclass
from typing import Final

from lockstep.core.order import Steps

_SECONDS_PER_HOUR: Final = 3600.0


@dataclass(frozen=True)
class CostParameters:
    """The parameters of a cost estimate. A parameter is None if the cost wasn't requested.

    `price_per_hour` is the price of a device. `mtbf_s` is the mean time between failures of the run, and `save_s` is
    the duration of a save, both in seconds.
    """

    price_per_hour: float | None = None
    mtbf_s: float | None = None
    save_s: float = 0.0


@dataclass(frozen=True)
class Costs:
    """The estimated costs of a placement. A field is None if the cost wasn't requested.

    `epoch` and `run` are the prices of all training steps in an epoch and in the full run. `save_every` is the optimal
    number of steps between two saves. `kept` is the resulting fraction of time that is spent on steps that aren't lost,
    assuming that restarts take no time.
    """

    epoch: float | None = None
    run: float | None = None
    save_every: int | None = None
    kept: float | None = None


def estimate_costs(step_s: float, processes: int, steps: Steps, parameters: CostParameters) -> Costs:
    """Estimate the costs of a placement from its step time in seconds, with one device per process."""
    epoch = run = save_every = kept = None
    if parameters.price_per_hour is not None:
        step_price = step_s * processes * parameters.price_per_hour / _SECONDS_PER_HOUR
        epoch, run = step_price * steps.per_epoch, step_price * steps.total
    if parameters.mtbf_s is not None:
        save_every = max(1, round(compute_optimal_interval_s(parameters.save_s, parameters.mtbf_s) / step_s))
        kept = compute_kept_fraction(save_every * step_s, parameters.save_s, parameters.mtbf_s)
    return Costs(epoch, run, save_every, kept)


def compute_optimal_interval_s(save_s: float, mtbf_s: float) -> float:
    """Return the training time between two saves that minimizes the total run time, in seconds.

    Source: J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, Future Generation
    Computer Systems 22 (2006), equation 37. Its first term is due to J. W. Young (Communications of the ACM 17, 1974).
    """
    ratio = save_s / (2 * mtbf_s)
    if ratio >= 1:
        return mtbf_s
    return math.sqrt(2 * save_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s


def compute_kept_fraction(interval_s: float, save_s: float, mtbf_s: float) -> float:
    """Return the fraction of time that is spent on steps that aren't lost, assuming a constant failure rate.

    `interval_s` is the training time between two saves. The formula is Daly's complete cost function, with restarts
    that take no time. See `compute_optimal_interval_s` for the source.
    """
    ratio = (interval_s + save_s) / mtbf_s
    return interval_s / mtbf_s * math.exp(-ratio) / -math.expm1(-ratio)
