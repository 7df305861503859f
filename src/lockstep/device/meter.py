"""Measures training throughput and peak memory."""

import resource
import sys
import time
from typing import final

import torch


@final
class Meter:
    """Measures samples per second. Only `read` synchronizes with the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.restart()

    def add(self, samples: int, weight: int) -> None:
        """Add trained samples and their total weight to the counts."""
        self._samples += samples
        self._weight += weight

    def restart(self) -> None:
        """Reset the counts and the clock. Call this after an interruption of training, such as an evaluation."""
        self._samples = self._weight = 0
        self._start_s = time.perf_counter()

    def read(self) -> tuple[float, float]:
        """Return samples per second and weight per second since the last read or restart."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        seconds = time.perf_counter() - self._start_s
        rates = (self._samples / seconds, self._weight / seconds) if self._samples else (0.0, 0.0)
        self.restart()
        return rates

    def peak_bytes(self) -> int:
        """Return the peak memory of this process in bytes: GPU memory on CUDA, or resident set size on the CPU."""
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        unit = 1 if sys.platform == "darwin" else 1024  # macOS reports bytes, and Linux reports KiB
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
