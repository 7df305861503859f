"""Measures training speed and peak memory."""

import resource
import sys
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeVar, final

import torch

T = TypeVar("T")


class Speed(NamedTuple):
    """The speed of training steps.

    - `samples_per_s`: the number of samples per second.
    - `weight_per_s`: the total weight of the samples per second.
    - `data_s`: the mean time that a step waits for its data, in seconds.
    """

    samples_per_s: float
    weight_per_s: float
    data_s: float


@final
class SpeedMeter:
    """Measures the speed of training steps. Only `read` synchronizes with the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.restart()

    def add_step(self, num_samples: int, weight: int) -> None:
        """Count a completed step with its number of samples and their total weight."""
        self._steps += 1
        self._samples += num_samples
        self._weight += weight

    def measure_data_waits(self, data: Iterable[T]) -> Iterator[T]:
        """Yield the items of `data`, and measure the time that each step waits for its item."""
        iterator = iter(data)
        while True:
            start_s = time.perf_counter()
            try:
                item = next(iterator)
            except StopIteration:
                return
            self._data_s += time.perf_counter() - start_s
            yield item

    def restart(self) -> None:
        """Reset the counts and the clock. Call this after an interruption of training, such as an evaluation."""
        self._steps = self._samples = self._weight = 0
        self._data_s = 0.0
        self._start_s = time.perf_counter()

    def read(self) -> Speed:
        """Return the speed since the previous call of `read` or `restart`."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        seconds = time.perf_counter() - self._start_s
        speed = Speed(0.0, 0.0, 0.0)
        if self._samples:
            speed = Speed(self._samples / seconds, self._weight / seconds, self._data_s / self._steps)
        self.restart()
        return speed

    def get_peak_bytes(self) -> int:
        """Return the peak memory of this process in bytes: GPU memory on CUDA, or resident set size on the CPU."""
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        unit = 1 if sys.platform == "darwin" else 1024  # macOS reports bytes, and Linux reports KiB
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
