"""Runs a command per host, or per rank of a host. If a command fails, all commands are ended."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Final, NamedTuple

_POLL_S: Final = 0.1
_STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
STOP_S: Final = 75.0  # slightly longer than lockstep.common.follow_parent allows a command


class Ended(NamedTuple):
    """The exit of a command: its exit code in shell convention, and the signal that ended all commands, if any."""

    host: str
    code: int
    stop_signal: signal.Signals | None = None


def run_on_hosts(
    commands: Mapping[str, Sequence[str]],
    say: Callable[[str], None],
    stop_s: float = STOP_S,
    required: int | None = None,
    secret: str = "",
    is_local: bool = False,
) -> Ended:
    """Run `commands`, keyed by host or rank, until all of them have exited. Return the first failure, if any.

    The stdin of a command stays open while the command should run. Closing stdin asks the command to end. stdin is
    closed if a different command fails, and on SIGINT, SIGTERM, SIGHUP and SIGUSR1. If a command exits successfully,
    the other commands have time to finish. A command that takes longer than `stop_s`, or that is still running at a
    second SIGINT, is killed.

    If `secret` is set, it is the first line of each command's stdin. Commands that run without ssh (`is_local`) receive
    signals directly, and the sender of the signal decides how long they may take.

    If `required` is set, a failed command doesn't end the other commands as long as at least `required` commands are
    running or have succeeded. If these commands succeed, the failure isn't returned.
    """
    required = len(commands) if required is None else required
    events: SimpleQueue[Ended | signal.Signals] = SimpleQueue()
    processes: dict[str, subprocess.Popen[bytes]] = {}
    exits: list[Ended] = []
    signals: list[signal.Signals] = []
    deadline: float | None = None
    with _signals_to(events):
        try:
            for host, command in commands.items():
                processes[host] = _start(host, command, events)
                if secret:
                    _send_secret(processes[host], secret)
            while processes:
                event = _next(events, deadline)
                if isinstance(event, Ended):
                    _ask_to_end({event.host: processes.pop(event.host)})
                    exits.append(event)
                elif event is not None:
                    signals.append(event)
                if event is None or signals.count(signal.SIGINT) > 1:
                    _kill(processes)
                    deadline = None
                elif _stops(event) and processes and not signals and len(processes) + _successes(exits) >= required:
                    say(f"{_reason(event)}; continuing with {', '.join(processes)}")
                    continue
                elif _stops(event) and processes:
                    say(f"{_reason(event)}; ending {', '.join(processes)}")
                    if is_local and not isinstance(event, Ended):
                        for process in processes.values():
                            process.send_signal(event)
                        continue
                    _ask_to_end(processes)
                deadline = deadline or time.monotonic() + stop_s
        finally:
            _kill(processes)
            for process in processes.values():
                process.wait()
    first = next((exited for exited in exits if bool(exited.code) == (_successes(exits) < required)), exits[0])
    return first._replace(stop_signal=signals[0] if signals else None)


def _start(host: str, command: Sequence[str], events: SimpleQueue[Ended | signal.Signals]) -> subprocess.Popen[bytes]:
    # In a separate process group, the command doesn't receive Ctrl-C, so that the run has time to save.
    process = subprocess.Popen(command, stdin=subprocess.PIPE, process_group=0)

    def wait() -> None:
        code = process.wait()
        events.put(Ended(host, code if code >= 0 else 128 - code))

    threading.Thread(target=wait, daemon=True).start()
    return process


def _send_secret(process: subprocess.Popen[bytes], secret: str) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # the command has exited, which its `Ended` event reports
        process.stdin.write(os.fsencode(f"{secret}\n"))
        process.stdin.flush()


def _next(events: SimpleQueue[Ended | signal.Signals], deadline: float | None) -> Ended | signal.Signals | None:
    """Return the next event, or None if there is no event before the deadline.

    This polls, because a signal that the kernel delivers to a different thread doesn't wake up this thread.
    """
    while deadline is None or time.monotonic() < deadline:
        with suppress(Empty):
            return events.get(timeout=_POLL_S)
    return None


def _successes(exits: Sequence[Ended]) -> int:
    return sum(not exited.code for exited in exits)


def _stops(event: Ended | signal.Signals) -> bool:
    return not isinstance(event, Ended) or event.code != 0


def _reason(event: Ended | signal.Signals) -> str:
    return f"{event.host} ended with exit code {event.code}" if isinstance(event, Ended) else event.name


def _ask_to_end(running: Mapping[str, subprocess.Popen[bytes]]) -> None:
    for process in running.values():
        if process.stdin is not None:
            with suppress(BrokenPipeError):
                process.stdin.close()


def _kill(running: Mapping[str, subprocess.Popen[bytes]]) -> None:
    _ask_to_end(running)
    for process in running.values():
        process.kill()


@contextmanager
def _signals_to(events: SimpleQueue[Ended | signal.Signals]) -> Iterator[None]:
    """Put termination signals into the queue while the block runs."""
    # If SIGHUP is ignored, as under nohup, keep ignoring it.
    signal_numbers = [
        signal_number
        for signal_number in _STOP_SIGNALS
        if signal_number != signal.SIGHUP or signal.getsignal(signal_number) != signal.SIG_IGN
    ]
    before = {
        signal_number: signal.signal(signal_number, lambda got, _: events.put(signal.Signals(got)))
        for signal_number in signal_numbers
    }
    try:
        yield
    finally:
        for signal_number, action in before.items():
            signal.signal(signal_number, action)
