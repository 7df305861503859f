"""Measures the current and the peak number of bytes that a process has allocated.

The bytes are counted by the C library (glibc), which allocates the memory of CPU tensors. The count includes all
tensors of all threads, regardless of which object holds them, and excludes freed memory. In contrast, the resident set
size includes memory that the allocator keeps for later, and a traversal of Python objects misses tensors that are held
by autograd and C++ reducers. To find the peak, a background thread polls the count, so peaks of less than a millisecond
can be missed.
"""

import ctypes
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, final

import psutil

_POLL_INTERVAL_S: Final = 0.0002
# Switch interval of the GIL. With the default, the polling thread would have to wait 5 ms for the GIL.
_SWITCH_INTERVAL_S: Final = 0.0001


def can_count_bytes() -> bool:
    """Return whether the C library can count allocated bytes, which requires glibc 2.33 or later."""
    return getattr(ctypes.CDLL(None), "mallinfo2", None) is not None


@final
class LiveByteCounter:
    """Counts the allocated bytes of this process, relative to when this object was created."""

    def __init__(self) -> None:
        assert can_count_bytes()  # with an older glibc, psutil would fall back to 32-bit counters
        self._start = 0
        self._start = self.measure()

    def measure(self) -> int:
        """Run garbage collection and return the number of bytes in use."""
        gc.collect()
        return self._count_bytes() - self._start

    def measure_peak(self, function: Callable[[], object]) -> int:
        """Call `function` and return the peak number of bytes in use during the call."""
        with self.track_peak() as peaks:
            function()
        return peaks[0]

    @contextmanager
    def exclude(self) -> Iterator[None]:
        """Exclude from the count the memory that is allocated in the `with` block and still in use when it exits."""
        before = self.measure()
        yield
        self._start += self.measure() - before

    @contextmanager
    def track_peak(self) -> Iterator[list[int]]:
        """Track the peak number of bytes in use during the `with` block. Yields a list that contains this number."""
        peak = [self.measure()]
        stop = threading.Event()

        def watch() -> None:
            while not stop.wait(_POLL_INTERVAL_S):
                peak[0] = max(peak[0], self._count_bytes() - self._start)

        switch_interval = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield peak
        finally:
            stop.set()
            thread.join()
            sys.setswitchinterval(switch_interval)

    def _count_bytes(self) -> int:
        info = psutil.heap_info()
        return info.heap_used + info.mmap_used
