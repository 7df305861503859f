"""Requests to stop: the first one is kept for the next step boundary, a second Ctrl-C ends at once."""

from __future__ import annotations

import os
import signal
from functools import partial
from types import FrameType
from typing import Final, Literal, final

from lockstep.errors import EXIT_INTERRUPTED, EXIT_SAVED

Reason = Literal["SIGINT", "SIGTERM", "SIGUSR1"]

# Wishes as numbers, so that ranks can agree on the largest: Ctrl-C wins, since somebody waits at the terminal. SIGUSR1
# is what batch systems are often told to send some minutes before the end of a job's time.
WISHES: Final[dict[int, Reason]] = {1: "SIGUSR1", 2: "SIGTERM", 3: "SIGINT"}
EXIT_CODES: Final[dict[Reason, int]] = {"SIGUSR1": EXIT_SAVED, "SIGTERM": EXIT_SAVED, "SIGINT": EXIT_INTERRUPTED}
STOPPING: Final = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
_INTERRUPT: Final = 3


@final
class StopRequest:
    """Remembers the signals that stop a run; `wish` is 0 until one comes. Construct it in the main thread."""

    def __init__(self) -> None:
        self.wish = 0
        for wish, name in WISHES.items():
            signal.signal(signal.Signals[name], partial(self._heard, wish))

    def _heard(self, wish: int, _number: int, _frame: FrameType | None) -> None:
        if wish == self.wish == _INTERRUPT:
            os._exit(EXIT_INTERRUPTED)
        self.wish = max(self.wish, wish)
