"""How good a prediction was: what a step of the run takes beside what a plan said of it (planning/measure.py)."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Final, TypeVar, final

import torch

from lockstep.comm.world import World
from lockstep.device.clock import Clock
from lockstep.device.live_bytes import LiveBytes, can_count
from lockstep.setup.resolved import Resolved

T = TypeVar("T")
_WATCHED: Final = 2  # the first step in which memory is looked at: the one before makes the optimizer's state
_TIMED: Final = 7  # the first that is not, and whose time counts


@final
class Grading:
    """Of one rank; to be made before its engine is, from where on memory is counted, as in a plan.

    The time is that of the steps after the watched ones, without input, evaluation and saving; `clock` splits it.
    """

    def __init__(self, world: World, clock: Clock) -> None:
        self._device = world.device
        self._clock = clock
        self._live = None if world.on_gpu else LiveBytes()
        self._peak = 0
        self._steps = 0
        self._before = 0.0  # seconds of steps that do not count

    def left_out(self) -> AbstractContextManager[None]:
        """Return a context in which what is not part of a step takes memory."""
        return nullcontext() if self._live is None else self._live.left_out()

    def watch(self, steps: Iterator[T]) -> Iterator[T]:
        """Yield what each step is to be done with; a step goes on until the next one is asked for."""
        for each in steps:
            self._steps += 1
            if self._steps == _TIMED:
                self._before = self._clock.split_seconds()
            if self._live is None or not _WATCHED <= self._steps < _TIMED:
                yield each
                continue
            with self._live.watched() as most:
                yield each
            self._peak = max(self._peak, most[0])

    def measured(self) -> dict[str, float]:
        """Return the mean seconds of a step, and the most bytes in one; nothing where there were too few steps."""
        if self._steps < _TIMED:
            return {}
        peak = self._peak if self._live is not None else torch.cuda.max_memory_allocated(self._device)
        seconds = (self._clock.split_seconds() - self._before) / (self._steps + 1 - _TIMED)
        return {"step_s": seconds, "peak_bytes": peak}


def is_predicted(resolved: Resolved) -> bool:
    """Whether a plan said what a step takes on this placement, and it can be counted here: not without glibc."""
    predicted, here = resolved.run.predicted, (resolved.strategy_name, resolved.processes)
    return predicted is not None and (predicted.strategy, predicted.processes) == here and can_count()
