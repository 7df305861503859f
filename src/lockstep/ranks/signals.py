"""Signals that stop a run. The first signal stops the run at the next step boundary, a second Ctrl-C immediately."""

import os
import signal
import sys
import threading
from contextlib import suppress
from functools import partial
from types import FrameType, TracebackType
from typing import Any, Final, Literal, Self, final

from lockstep.common.interrupts import InterruptCount
from lockstep.errors import EXIT_INTERRUPTED, EXIT_SAVED

StopSignal = Literal["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"]

# Levels are integers, so that the ranks can agree on the maximum. SIGINT (Ctrl-C) has the highest level, because a user
# is waiting at the terminal. Batch systems are often configured to send SIGUSR1 a few minutes before the time limit of
# a job. SIGHUP is sent when the terminal closes.
STOP_LEVELS: Final[dict[int, StopSignal]] = {1: "SIGUSR1", 2: "SIGHUP", 3: "SIGTERM", 4: "SIGINT"}
EXIT_CODES: Final[dict[StopSignal, int]] = {
    "SIGUSR1": EXIT_SAVED,
    "SIGHUP": EXIT_SAVED,
    "SIGTERM": EXIT_SAVED,
    "SIGINT": EXIT_INTERRUPTED,
}
_SIGINT_LEVEL: Final = 4


def get_stop_signals() -> list[signal.Signals]:
    """Return the signals that stop a run. Excludes SIGHUP if the process ignores it, as under nohup."""
    numbers = [signal.Signals[name] for name in STOP_LEVELS.values()]
    return [number for number in numbers if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]


def format_early_stop(signal_number: int) -> str:
    """Return the message to print if a signal ends a run before training begins."""
    name = signal.Signals(signal_number).name
    return f"stopped by {name} before training: nothing was saved, and the same command starts again"


@final
class EarlyStop:
    """A context manager that prints a message if a signal ends a command before training begins.

    The message says that nothing was saved. The signals still have their usual effect. Call `begin_training` when
    training begins. From then on, nothing is printed.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._previous: dict[signal.Signals, Any] = {}
        self._is_active = False

    def __enter__(self) -> Self:
        self._is_active = True
        for number in get_stop_signals() if threading.current_thread() is threading.main_thread() else ():
            if number != signal.SIGINT:  # Python raises KeyboardInterrupt
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._is_active and kind is not None and issubclass(kind, KeyboardInterrupt):
            self._print(signal.SIGINT)
            raise SystemExit(EXIT_INTERRUPTED) from None
        self.begin_training()

    def begin_training(self) -> None:
        """Stop printing the message, because training begins. Restores the previous signal handlers."""
        self._is_active = False
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, previous)
        self._previous.clear()

    def _on_signal(self, signal_number: int, _frame: FrameType | None) -> None:
        if os.getpid() == self._process:  # a forked process inherits the handler, but must not print
            self._print(signal_number)
        signal.signal(signal_number, signal.SIG_DFL)
        os.kill(os.getpid(), signal_number)

    def _print(self, signal_number: int) -> None:
        with suppress(OSError, RuntimeError):  # the terminal may be closed, or the signal interrupted a write to it
            sys.stderr.write(f"{format_early_stop(signal_number)}\n")
            sys.stderr.flush()


@final
class StopRequest:
    """Records the signals that stop a run. `level` is 0 until a signal arrives.

    Python delivers signals only to the main thread. If the run is in a different thread, as in Ray Train, no signal
    handlers are installed.
    """

    def __init__(self) -> None:
        self.level = 0
        self._interrupts = InterruptCount()
        self._actions: dict[signal.Signals, tuple[Any, Any]] = {}  # installed handler and previous handler
        levels = {signal.Signals[name]: level for level, name in STOP_LEVELS.items()}
        for number in get_stop_signals() if threading.current_thread() is threading.main_thread() else ():
            action = partial(self._on_signal, levels[number])
            self._actions[number] = action, signal.signal(number, action)

    def release(self) -> None:
        """Restore the previous signal handlers, except for signals whose handler has been replaced in the meantime.

        The next training loop may already have installed its handlers: if this loop ended with an error, Python may
        only close its generator, which calls `release`, much later.
        """
        for number, (action, previous) in self._actions.items():
            if signal.getsignal(number) is action:
                signal.signal(number, previous)
        self._actions.clear()

    def _on_signal(self, level: int, _number: int, _frame: FrameType | None) -> None:
        if level == _SIGINT_LEVEL and self._interrupts.is_second():
            os._exit(EXIT_INTERRUPTED)
        self.level = max(self.level, level)
