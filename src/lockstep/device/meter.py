"""How fast training goes and how much memory it takes."""

import resource
import sys
import time
from typing import final

import torch


@final
class Meter:
    """Counts samples against the clock; only reading it waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.restart()

    def add(self, samples: int, weight: int) -> None:
        """Count samples as trained on, and what they weigh."""
        self._samples += samples
        self._weight += weight

    def restart(self) -> None:
        """Forget what was counted: what comes between now and the last read is not training."""
        self._samples = self._weight = 0
        self._since = time.perf_counter()

    def read(self) -> tuple[float, float]:
        """Return samples and weight per second since the last read or restart."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        seconds = time.perf_counter() - self._since
        rates = (self._samples / seconds, self._weight / seconds) if self._samples else (0.0, 0.0)
        self.restart()
        return rates

    def peak_bytes(self) -> int:
        """Return the most memory this process has had: of the GPU where there is one, else resident."""
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        unit = 1 if sys.platform == "darwin" else 1024  # macOS counts in bytes, Linux in KiB
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
