"""Measures how much time a rank spends on each activity: computing, waiting for a core, and waiting for other ranks."""

import os
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, final

import torch

_SCHEDSTAT: Final = "/proc/thread-self/schedstat"  # contains: ns on a core, ns in the run queue, number of time slices
_MAX_LINE_BYTES: Final = 64
_SPLIT_ACTIVITIES: Final = ("computing", "waiting for a core", "waiting")


@final
class ActivityClock:
    """Measures the time that the current thread spends on each activity, starting with the activity `first_activity`.

    The time of the activity `split_activity` is divided into three activities: `computing` on a core, `waiting for a
    core` in the run queue of the kernel (only measured on Linux), and `waiting` for other ranks and their data. On
    CUDA, the time isn't divided, because the thread spins while it waits for the GPU.
    """

    def __init__(self, device: torch.device, first_activity: str, split_activity: str) -> None:
        self._split = split_activity if device.type == "cpu" else None
        self._parts = _SPLIT_ACTIVITIES if device.type == "cpu" else (split_activity,)
        try:
            self._schedstat = os.open(_SCHEDSTAT, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # not Linux, or a kernel without these statistics
            self._schedstat = -1
        self._seconds: dict[str, float] = defaultdict(float)
        self._activity = first_activity
        self._last_times = self._read_times()

    def start_activity(self, activity: str) -> None:
        """End the current activity and start `activity`."""
        times = self._read_times()
        wall, on_core, in_queue = (after - previous for after, previous in zip(times, self._last_times, strict=True))
        if self._activity == self._split:
            for part, seconds in zip(
                _SPLIT_ACTIVITIES, (on_core, in_queue, max(0.0, wall - on_core - in_queue)), strict=True
            ):
                self._seconds[part] += seconds
        else:
            self._seconds[self._activity] += wall
        self._activity, self._last_times = activity, times

    @contextmanager
    def track_activity(self, activity: str) -> Iterator[None]:
        """Measure the `with` block as `activity`. On exit, return to the activity from before the block."""
        previous = self._activity
        self.start_activity(activity)
        try:
            yield
        finally:
            self.start_activity(previous)

    def get_activity_seconds(self) -> dict[str, float]:
        """Return the seconds spent on each activity so far."""
        self.start_activity(self._activity)
        return dict(self._seconds)

    def get_split_seconds(self) -> float:
        """Return the seconds spent on the activity `split_activity` so far."""
        seconds = self.get_activity_seconds()
        return sum(seconds.get(part, 0.0) for part in self._parts)

    def close(self) -> None:
        """Close the file with the kernel's scheduling statistics. Can be called more than once."""
        descriptor, self._schedstat = self._schedstat, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _read_times(self) -> tuple[float, float, float]:
        """Return the current wall-clock time, the time on a core and the time in the run queue, in seconds."""
        waited_ns = os.pread(self._schedstat, _MAX_LINE_BYTES, 0).split()[1] if self._schedstat >= 0 else b"0"
        return time.perf_counter(), time.thread_time(), int(waited_ns) / 1e9
