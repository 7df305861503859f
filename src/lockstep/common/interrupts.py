"""Counts interrupts. One Ctrl-C can send several signals to a process."""

import time
from typing import Final, final

DUPLICATES_S: Final = 0.5


@final
class InterruptCount:
    """Distinguishes a second Ctrl-C from duplicates of the first one, which arrive within `DUPLICATES_S` seconds.

    If the parent of a worker of `torch.multiprocessing.spawn` dies, the worker can receive one SIGINT per thread of
    the parent. `timeout` sends its signal to the command and to the command's process group.
    """

    def __init__(self) -> None:
        self._first_s: float | None = None

    def is_second(self) -> bool:
        """Return whether this SIGINT is a second Ctrl-C. Call this once for each SIGINT."""
        now = time.monotonic()
        if self._first_s is None:
            self._first_s = now
        return now - self._first_s > DUPLICATES_S
