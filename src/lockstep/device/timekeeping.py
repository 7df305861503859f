"""The clocks of this host: whether they run forwards and alike, and whether anybody keeps the time right."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path
from typing import Any, Final

_SOURCE: Final = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
_TIMEX_BYTES: Final = 512  # struct timex of <sys/timex.h> has 208 on 64 bits; `modes` comes first, and 0 only reads
_UNSYNCHRONISED: Final = 5  # TIME_ERROR
_SAMPLES: Final = 20_000


def clock() -> dict[str, Any]:
    """Return what the clocks do in some 60 ms, the kernel's source of time, and whether it is kept right.

    `backwards`: how often a reading of the monotonic clock was before the last. `drift`: by what part of the time that
    passed the clock of the day went otherwise. `reading_ns`: what one reading costs. `synchronised`: None where the
    system does not report it.
    """
    backwards, last = 0, time.monotonic_ns()
    began = last
    for _ in range(_SAMPLES):
        now = time.monotonic_ns()
        backwards += now < last
        last = now
    reading_ns = (last - began) / _SAMPLES
    monotonic, of_day = _both()
    time.sleep(0.05)
    later, of_day_later = _both()
    return {
        "backwards": backwards,
        "drift": (of_day_later - of_day) / (later - monotonic) - 1,
        "reading_ns": reading_ns,
        "source": _SOURCE.read_text(encoding="ascii").strip() if _SOURCE.exists() else None,
        "synchronised": _synchronised(),
    }


def _both() -> tuple[float, float]:
    """Return the monotonic clock and that of the day at one moment: the pair that was read the quickest."""
    found = []
    for _ in range(9):
        before, of_day, after = time.monotonic(), time.time(), time.monotonic()
        found.append((after - before, before, of_day))
    _, monotonic, of_day = min(found)
    return monotonic, of_day


def _synchronised() -> bool | None:
    """Return whether the kernel counts its clock as kept right, by NTP or PTP; only Linux tells."""
    adjtimex = getattr(ctypes.CDLL(None), "adjtimex", None)
    if adjtimex is None:
        return None
    state = adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    return None if state < 0 else state != _UNSYNCHRONISED
