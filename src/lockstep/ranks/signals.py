"""Requests to stop: the first one is kept for the next step boundary, a second Ctrl-C ends at once."""

import os
import signal
import threading
from functools import partial
from types import FrameType
from typing import Any, Final, Literal, final

from lockstep.errors import EXIT_INTERRUPTED, EXIT_SAVED

Reason = Literal["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"]

# Wishes as numbers, so that ranks can agree on the largest: Ctrl-C wins, since somebody waits at the terminal. SIGUSR1
# is what batch systems are often told to send some minutes before the end of a job's time; SIGHUP comes when the
# terminal is closed.
STOP_LEVELS: Final[dict[int, Reason]] = {1: "SIGUSR1", 2: "SIGHUP", 3: "SIGTERM", 4: "SIGINT"}
EXIT_CODES: Final[dict[Reason, int]] = {
    "SIGUSR1": EXIT_SAVED,
    "SIGHUP": EXIT_SAVED,
    "SIGTERM": EXIT_SAVED,
    "SIGINT": EXIT_INTERRUPTED,
}
_INTERRUPT: Final = 4


def stopping() -> list[signal.Signals]:
    """Return the signals that stop a run: not SIGHUP where it is ignored, as nohup has it."""
    numbers = [signal.Signals[name] for name in STOP_LEVELS.values()]
    return [number for number in numbers if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]


@final
class StopRequest:
    """Remembers the signals that stop a run; `level` is 0 until one comes.

    Python hands signals to the main thread alone: a run in another one, as Ray Train has it, leaves them to whoever
    started that.
    """

    def __init__(self) -> None:
        self.level = 0
        self._before: dict[signal.Signals, tuple[Any, Any]] = {}  # what is done here, and what was done
        levels = {signal.Signals[name]: level for level, name in STOP_LEVELS.items()}
        for number in stopping() if threading.current_thread() is threading.main_thread() else ():
            own = partial(self._heard, levels[number])
            self._before[number] = own, signal.signal(number, own)

    def release(self) -> None:
        """Give the signals back to who had them, but for those that another has taken since.

        A loop that an error left is collected whenever Python comes to it, and may be long after another has begun.
        """
        for number, (own, action) in self._before.items():
            if signal.getsignal(number) is own:
                signal.signal(number, action)
        self._before.clear()

    def _heard(self, level: int, _number: int, _frame: FrameType | None) -> None:
        if level == self.level == _INTERRUPT:
            os._exit(EXIT_INTERRUPTED)
        self.level = max(self.level, level)
