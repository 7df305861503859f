"""Measures the time and memory of steps, for comparison with the prediction of a plan (planning/measure.py)."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Final, TypeVar, final

import torch

from lockstep.comm.world import World
from lockstep.device.clock import ActivityClock
from lockstep.device.live_bytes import LiveByteCounter, can_count_bytes
from lockstep.setup.resolved import ResolvedConfig

T = TypeVar("T")
_FIRST_MEMORY_STEP: Final = 2  # the first step whose memory is measured, because step 1 creates the optimizer state
_FIRST_TIMED_STEP: Final = 7  # the first step whose time is measured, after the steps whose memory is measured


@final
class StepMeasurements:
    """Measures the peak memory and then the mean time of the steps of a rank.

    Create it before the engine, because memory that was allocated earlier isn't counted. The planner measures memory in
    the same way. Time that `clock` attributes to other phases, such as loading data, isn't part of the step time.
    """

    def __init__(self, world: World, clock: ActivityClock) -> None:
        self._device = world.device
        self._clock = clock
        self._live = None if world.on_gpu else LiveByteCounter()
        self._peak = 0
        self._steps = 0
        self._before = 0.0  # seconds before the first step whose time is measured

    def exclude(self) -> AbstractContextManager[None]:
        """Return a context manager whose allocations aren't counted, because they aren't part of a step."""
        return nullcontext() if self._live is None else self._live.exclude()

    def measure_steps(self, steps: Iterator[T]) -> Iterator[T]:
        """Yield the items of `steps`, and measure each step. A step ends when the caller requests the next item."""
        for item in steps:
            self._steps += 1
            if self._steps == _FIRST_TIMED_STEP:
                self._before = self._clock.get_split_seconds()
            if self._live is None or not _FIRST_MEMORY_STEP <= self._steps < _FIRST_TIMED_STEP:
                yield item
                continue
            with self._live.track_peak() as peak:
                yield item
            self._peak = max(self._peak, peak[0])

    def get_result(self) -> dict[str, float]:
        """Return the mean step time in seconds and the peak memory in bytes. Return {} if there were too few steps."""
        if self._steps < _FIRST_TIMED_STEP:
            return {}
        peak = self._peak if self._live is not None else torch.cuda.max_memory_allocated(self._device)
        seconds = (self._clock.get_split_seconds() - self._before) / (self._steps + 1 - _FIRST_TIMED_STEP)
        return {"step_s": seconds, "peak_bytes": peak}


def can_compare_with_plan(resolved: ResolvedConfig) -> bool:
    """Return whether a plan has predicted this placement, and memory can be measured here (requires glibc)."""
    predicted, placement = resolved.run.predicted, (resolved.strategy_name, resolved.processes)
    return predicted is not None and (predicted.strategy, predicted.processes) == placement and can_count_bytes()
