"""What a placement costs by what was measured: money for its devices, and the time that saves and failures take."""

import math
from dataclasses import dataclass
from typing import Final

from lockstep.core.order import Steps

_HOUR: Final = 3600.0


@dataclass(frozen=True)
class Terms:
    """The `price` of a device and hour, `mtbf_s` seconds between two failures of the run, and `save_s` of a save."""

    price: float | None = None
    mtbf_s: float | None = None
    save_s: float = 0.0


@dataclass(frozen=True)
class Costs:
    """Of a placement; None is what was not asked for.

    An `epoch` and the whole `run` cost what their steps do. With a save after every `save_every` steps the share `kept`
    of the time goes to steps that count; a restart is taken to be over at once.
    """

    epoch: float | None = None
    run: float | None = None
    save_every: int | None = None
    kept: float | None = None


def costs(step_s: float, processes: int, steps: Steps, terms: Terms) -> Costs:
    """Return what a placement costs whose step takes so many seconds, with a device for each process."""
    epoch = run = every = share = None
    if terms.price is not None:
        step = step_s * processes * terms.price / _HOUR
        epoch, run = step * steps.per_epoch, step * steps.total
    if terms.mtbf_s is not None:
        every = max(1, round(interval(terms.save_s, terms.mtbf_s) / step_s))
        share = kept(every * step_s, terms.save_s, terms.mtbf_s)
    return Costs(epoch, run, every, share)


def interval(save_s: float, mtbf_s: float) -> float:
    """Return the seconds of training between two saves that lose the least time.

    J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, Future Generation Computer
    Systems 22 (2006), equation 37; its first term is J. W. Young's (Communications of the ACM 17, 1974).
    """
    ratio = save_s / (2 * mtbf_s)
    if ratio >= 1:
        return mtbf_s
    return math.sqrt(2 * save_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s


def kept(interval_s: float, save_s: float, mtbf_s: float) -> float:
    """Return the share of the time that goes to steps that count, where failures are as likely at any time.

    Daly's complete cost function, with restarts of no time.
    """
    lost = (interval_s + save_s) / mtbf_s
    return interval_s / mtbf_s * math.exp(-lost) / -math.expm1(-lost)
