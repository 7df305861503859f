"""Waits for what another process does."""

import time
from collections.abc import Callable
from pathlib import Path


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait for a condition, and fail where it does not come true in time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited for {seconds:.0f} s"
        time.sleep(0.01)


def ended(pid: int) -> bool:
    """Return whether a process is gone, or a zombie; it may go at any moment, also while it is looked at."""
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return True
