"""Waits for what another process does."""

import time
from collections.abc import Callable


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait for a condition, and fail where it does not come true in time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited for {seconds:.0f} s"
        time.sleep(0.01)
