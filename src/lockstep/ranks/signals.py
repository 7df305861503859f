"""Signals that stop a run. The first signal stops the run at the next step boundary, and a second Ctrl-C at once."""

import os
import signal
import threading
from functools import partial
from types import FrameType
from typing import Any, Final, Literal, final

from lockstep.errors import EXIT_INTERRUPTED, EXIT_SAVED

Reason = Literal["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"]

# Levels are integers, so that ranks can agree on the maximum. Ctrl-C has the highest level, because a user is waiting
# at the terminal. Batch systems are often configured to send SIGUSR1 some minutes before the time limit of a job.
# SIGHUP is sent when the terminal closes.
STOP_LEVELS: Final[dict[int, Reason]] = {1: "SIGUSR1", 2: "SIGHUP", 3: "SIGTERM", 4: "SIGINT"}
EXIT_CODES: Final[dict[Reason, int]] = {
    "SIGUSR1": EXIT_SAVED,
    "SIGHUP": EXIT_SAVED,
    "SIGTERM": EXIT_SAVED,
    "SIGINT": EXIT_INTERRUPTED,
}
_INTERRUPT: Final = 4


def get_stop_signals() -> list[signal.Signals]:
    """Return the signals that stop a run. Excludes SIGHUP if the process ignores it, as under nohup."""
    numbers = [signal.Signals[name] for name in STOP_LEVELS.values()]
    return [number for number in numbers if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]


@final
class StopRequest:
    """Records the signals that stop a run. `level` is 0 until a signal arrives.

    Python delivers signals only to the main thread. If the run is in a different thread, as in Ray Train, no signal
    handlers are installed.
    """

    def __init__(self) -> None:
        self.level = 0
        self._actions: dict[signal.Signals, tuple[Any, Any]] = {}  # installed handler and previous handler
        levels = {signal.Signals[name]: level for level, name in STOP_LEVELS.items()}
        for number in get_stop_signals() if threading.current_thread() is threading.main_thread() else ():
            action = partial(self._on_signal, levels[number])
            self._actions[number] = action, signal.signal(number, action)

    def release(self) -> None:
        """Restore the previous signal handlers, except for signals whose handler has been replaced in the meantime.

        If an error ended a loop, Python may only collect this object long after another loop has started.
        """
        for number, (action, previous) in self._actions.items():
            if signal.getsignal(number) is action:
                signal.signal(number, previous)
        self._actions.clear()

    def _on_signal(self, level: int, _number: int, _frame: FrameType | None) -> None:
        if level == self.level == _INTERRUPT:
            os._exit(EXIT_INTERRUPTED)
        self.level = max(self.level, level)
