"""Requests to stop: the first one is kept for the next step boundary, a second Ctrl-C ends at once."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Final, Literal, final

from lockstep.errors import EXIT_INTERRUPTED, EXIT_SAVED

Reason = Literal["SIGINT", "SIGTERM"]

# Wishes as numbers, so that ranks can agree on the largest: Ctrl-C wins, since somebody waits at the terminal.
WISHES: Final[dict[int, Reason]] = {1: "SIGTERM", 2: "SIGINT"}
EXIT_CODES: Final[dict[Reason, int]] = {"SIGTERM": EXIT_SAVED, "SIGINT": EXIT_INTERRUPTED}


@final
class StopRequest:
    """Remembers SIGINT and SIGTERM; `wish` is 0 until one comes. Construct it in the main thread."""

    def __init__(self) -> None:
        self.wish = 0
        signal.signal(signal.SIGTERM, self._terminated)
        signal.signal(signal.SIGINT, self._interrupted)

    def _terminated(self, _number: int, _frame: FrameType | None) -> None:
        self.wish = max(self.wish, 1)

    def _interrupted(self, _number: int, _frame: FrameType | None) -> None:
        if self.wish == 2:
            os._exit(EXIT_INTERRUPTED)
        self.wish = 2
