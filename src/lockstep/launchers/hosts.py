"""Runs a command on each host, or for each rank of a host. If a command fails, all commands are stopped."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Final, NamedTuple

from lockstep.common.interrupts import InterruptCount

_POLL_S: Final = 0.1
_STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
STOP_TIMEOUT_S: Final = 75.0  # slightly longer than STOP_S of follow_parent.py, which stops a remote command


class CommandExit(NamedTuple):
    """The exit of a command: its exit code, following the shell convention.

    `stop_signal` is the signal that ended all commands, if any.
    """

    host: str
    code: int
    stop_signal: signal.Signals | None = None


def run_on_hosts(
    commands: Mapping[str, Sequence[str]],
    print_message: Callable[[str], None],
    stop_timeout_s: float = STOP_TIMEOUT_S,
    num_required: int | None = None,
    secret: str = "",
    is_local: bool = False,
) -> CommandExit:
    """Run a command for each host or rank, and wait until all have exited. Return the exit of the first that failed.

    If all commands succeeded, the first exit is returned.

    Closing the stdin of a command asks the command to end. If a command fails, or on SIGINT, SIGTERM, SIGHUP or
    SIGUSR1, stdin is closed for all remaining commands. Once a command has exited or was asked to end, the remaining
    commands have `stop_timeout_s` seconds to exit before they are killed. A second SIGINT kills them immediately.

    If `secret` is set, it is sent as the first line of each command's stdin. Set `is_local` if the commands run on this
    host without ssh. In this case, signals are forwarded to the commands, which may take as long as they need to
    exit.

    If `num_required` is set, a failed command doesn't end the remaining commands as long as at least `num_required`
    commands are running or have succeeded. If `num_required` commands succeed, the exit of a failed command isn't
    returned.
    """
    num_required = len(commands) if num_required is None else num_required
    events: SimpleQueue[CommandExit | signal.Signals] = SimpleQueue()
    processes: dict[str, subprocess.Popen[bytes]] = {}
    exits: list[CommandExit] = []
    signals: list[signal.Signals] = []
    interrupts = InterruptCount()
    deadline: float | None = None
    with _queue_signals(events):
        try:
            for host, command in commands.items():
                processes[host] = _start_command(host, command, events)
                if secret:
                    _send_secret(processes[host], secret)
            while processes:
                event = _wait_for_event(events, deadline)
                if isinstance(event, CommandExit):
                    _close_stdin({event.host: processes.pop(event.host)})
                    exits.append(event)
                elif event is not None:
                    signals.append(event)
                if event is None or (event == signal.SIGINT and interrupts.is_second()):
                    _kill(processes)
                    deadline = None
                elif (
                    _should_stop(event)
                    and processes
                    and not signals
                    and len(processes) + _count_successes(exits) >= num_required
                ):
                    print_message(f"{_describe_event(event)}; continuing with {', '.join(processes)}")
                    continue
                elif _should_stop(event) and processes:
                    print_message(f"{_describe_event(event)}; ending {', '.join(processes)}")
                    if is_local and not isinstance(event, CommandExit):
                        for process in processes.values():
                            process.send_signal(event)
                        continue
                    _close_stdin(processes)
                deadline = deadline or time.monotonic() + stop_timeout_s
        finally:
            _kill(processes)
            for process in processes.values():
                process.wait()
    first = next(
        (command_exit for command_exit in exits if bool(command_exit.code) == (_count_successes(exits) < num_required)),
        exits[0],
    )
    return first._replace(stop_signal=signals[0] if signals else None)


def _start_command(
    host: str, command: Sequence[str], events: SimpleQueue[CommandExit | signal.Signals]
) -> subprocess.Popen[bytes]:
    # A separate process group keeps Ctrl-C from killing the command, so that the run has time to save.
    process = subprocess.Popen(command, stdin=subprocess.PIPE, process_group=0)

    def wait() -> None:
        code = process.wait()
        events.put(CommandExit(host, code if code >= 0 else 128 - code))

    threading.Thread(target=wait, daemon=True).start()
    return process


def _send_secret(process: subprocess.Popen[bytes], secret: str) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # the command has exited; its CommandExit event reports this
        process.stdin.write(os.fsencode(f"{secret}\n"))
        process.stdin.flush()


def _wait_for_event(
    events: SimpleQueue[CommandExit | signal.Signals], deadline: float | None
) -> CommandExit | signal.Signals | None:
    """Return the next event, or None if there is no event before the deadline.

    This polls, because a signal that the kernel delivers to a different thread doesn't interrupt a blocking `get`.
    """
    while deadline is None or time.monotonic() < deadline:
        with suppress(Empty):
            return events.get(timeout=_POLL_S)
    return None


def _count_successes(exits: Sequence[CommandExit]) -> int:
    return sum(not command_exit.code for command_exit in exits)


def _should_stop(event: CommandExit | signal.Signals) -> bool:
    return not isinstance(event, CommandExit) or event.code != 0


def _describe_event(event: CommandExit | signal.Signals) -> str:
    return f"{event.host} ended with exit code {event.code}" if isinstance(event, CommandExit) else event.name


def _close_stdin(processes: Mapping[str, subprocess.Popen[bytes]]) -> None:
    for process in processes.values():
        if process.stdin is not None:
            with suppress(BrokenPipeError):
                process.stdin.close()


def _kill(processes: Mapping[str, subprocess.Popen[bytes]]) -> None:
    _close_stdin(processes)
    for process in processes.values():
        process.kill()


@contextmanager
def _queue_signals(events: SimpleQueue[CommandExit | signal.Signals]) -> Iterator[None]:
    """Return a context manager in which termination signals are put into the queue instead of ending this process."""
    # If SIGHUP is ignored, as under nohup, keep ignoring it.
    signal_numbers = [
        signal_number
        for signal_number in _STOP_SIGNALS
        if signal_number != signal.SIGHUP or signal.getsignal(signal_number) != signal.SIG_IGN
    ]
    previous_actions = {
        signal_number: signal.signal(signal_number, lambda received, _: events.put(signal.Signals(received)))
        for signal_number in signal_numbers
    }
    try:
        yield
    finally:
        for signal_number, action in previous_actions.items():
            signal.signal(signal_number, action)
