"""How many bytes of a process's memory are in use, and how many were at most.

Counted by the C library (glibc), from which torch takes a CPU tensor's memory: all threads' tensors, whoever holds
them, are in its figure, and what is freed is not. The resident set also has what the allocator keeps for later; a walk
over Python's objects misses what autograd and the reducers of C++ hold. The peak is found by asking again and again
from a thread, so one that is over within a millisecond may be missed.
"""

import ctypes
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, final

import psutil

_EVERY_S: Final = 0.0002
_SWITCH_S: Final = 0.0001  # the interpreter's lock goes round so often, else the thread waits 5 ms for it


def can_count() -> bool:
    """Whether the C library counts: glibc from version 2.33 on."""
    return getattr(ctypes.CDLL(None), "mallinfo2", None) is not None


@final
class LiveBytes:
    """Counts from what is in use at its making on."""

    def __init__(self) -> None:
        assert can_count()  # psutil asks an older one too, for figures of 32 bits
        self._start = 0
        self._start = self.now()

    def now(self) -> int:
        """Return the bytes in use, without garbage."""
        gc.collect()
        return self._bytes() - self._start

    def peak(self, work: Callable[[], object]) -> int:
        """Do the work and return the most bytes that were in use meanwhile."""
        with self.watched() as most:
            work()
        return most[0]

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Count what the block leaves behind as if it had been there before."""
        before = self.now()
        yield
        self._start += self.now() - before

    @contextmanager
    def watched(self) -> Iterator[list[int]]:
        """Give a list of one number: the most bytes in use since the block began, until it ends."""
        most = [self.now()]
        done = threading.Event()

        def watch() -> None:
            while not done.wait(_EVERY_S):
                most[0] = max(most[0], self._bytes() - self._start)

        before = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_S)
        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield most
        finally:
            done.set()
            thread.join()
            sys.setswitchinterval(before)

    def _bytes(self) -> int:
        info = psutil.heap_info()
        return info.heap_used + info.mmap_used
