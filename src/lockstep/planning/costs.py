"""Estimates costs of a placement from its step time: the price of devices, and the time lost to saves and failures."""

import math
from dataclasses import dataclass
from typing import Final

from lockstep.core.order import Steps

_HOUR: Final = 3600.0


@dataclass(frozen=True)
class Terms:
    """The parameters of a cost estimate.

    `price` is the price of a device per hour. `mtbf_s` is the mean time between failures of the run, and `save_s` is
    the duration of a save, both in seconds.
    """

    price: float | None = None
    mtbf_s: float | None = None
    save_s: float = 0.0


@dataclass(frozen=True)
class Costs:
    """The estimated costs of a placement. A field is None if it wasn't requested.

    `epoch` and `run` are the prices of the training steps of an epoch and of the full run. If the run is saved every
    `save_every` steps, `kept` is the fraction of the time that is spent on steps that aren't lost. Restarts are assumed
    to take no time.
    """

    epoch: float | None = None
    run: float | None = None
    save_every: int | None = None
    kept: float | None = None


def costs(step_s: float, processes: int, steps: Steps, terms: Terms) -> Costs:
    """Return the costs of a placement with a step time of `step_s` seconds and one device per process."""
    epoch = run = every = share = None
    if terms.price is not None:
        step = step_s * processes * terms.price / _HOUR
        epoch, run = step * steps.per_epoch, step * steps.total
    if terms.mtbf_s is not None:
        every = max(1, round(interval(terms.save_s, terms.mtbf_s) / step_s))
        share = kept_fraction(every * step_s, terms.save_s, terms.mtbf_s)
    return Costs(epoch, run, every, share)


def interval(save_s: float, mtbf_s: float) -> float:
    """Return the training time between two saves that minimizes the lost time, in seconds.

    Source: J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, Future Generation
    Computer Systems 22 (2006), equation 37. Its first term is due to J. W. Young (Communications of the ACM 17, 1974).
    """
    ratio = save_s / (2 * mtbf_s)
    if ratio >= 1:
        return mtbf_s
    return math.sqrt(2 * save_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s


def kept_fraction(interval_s: float, save_s: float, mtbf_s: float) -> float:
    """Return the fraction of the time that is spent on steps that aren't lost, assuming a constant failure rate.

    This uses Daly's complete cost function, with restarts that take no time.
    """
    ratio = (interval_s + save_s) / mtbf_s
    return interval_s / mtbf_s * math.exp(-ratio) / -math.expm1(-ratio)
