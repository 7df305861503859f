"""Starts the processes of a run on this machine, ends all when one fails, and reports the failure that came first.

Nothing listens on the network for it, and no folder is needed: the workers meet in an unnamed file, which the
agent holds open, and gloo listens at the loopback interface (comm/world.py). Through a pipe each worker says why it
ends.
"""

import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Final, Literal, NoReturn, final

from lockstep.common.follow_parent import die_with_parent
from lockstep.common.rank import RankInfo
from lockstep.device import ports
from lockstep.device.ulimits import limit_error, too_many_files
from lockstep.errors import EXIT_FAILED, EXIT_INTERRUPTED, Cause, PreflightError
from lockstep.ranks import oom
from lockstep.ranks.failure import Failure, from_json
from lockstep.ranks.member import end_process, member
from lockstep.ranks.rank_log import log_name, outliving_terminal
from lockstep.ranks.rendezvous import Rendezvous
from lockstep.ranks.signals import stopping
from lockstep.ranks.timing import TIMING, Timing

Worker = Callable[[Rendezvous], int]  # returns the exit code

_PIPE: Final = 1 << 16
_DONE: Final = b"done "


@dataclass(frozen=True)
class End:
    """How a worker ended, as the agent saw it at `time`, in seconds since 1970.

    `code` as in subprocess: -N is death by signal N. `result` is the exit code that it reported when its work was done,
    `failure` why it ended before that. A worker that was killed has neither; nor has one that left by os._exit.
    """

    rank: int
    code: int
    time: float
    result: int | None = None
    failure: Failure | None = None

    @property
    def secondary(self) -> bool:
        """Whether it ended only because of another rank."""
        return self.failure is not None and self.failure.secondary


def run_workers(
    worker: Worker,
    processes: int,
    method: Literal["fork", "spawn"],
    timeout_s: float,
    logs: Path | None = None,
    failed: Callable[[Failure], None] | None = None,
    timing: Timing = TIMING,
) -> int:
    """Run `worker` in so many processes, once all have joined, and return the exit code of the run.

    `logs` has the logs of the ranks, if they keep any, for the message of one that was killed. `failed` is called with
    the failure that ended the run.

    Signals that stop a run go on to the workers: one that knows StopRequest goes on to a step boundary, any other ends.
    A second SIGINT kills them. The failure that came first is printed; the others, which only lost a peer, are not.
    """
    check_loopback(timing)
    started = _Started(timing)
    with ExitStack() as held:
        received = held.enter_context(_relay_signals(started))
        address = held.enter_context(_nameless_file())
        held.callback(started.end)  # while the file is there: who looks for one that is gone waits for it
        for rank in range(processes):
            started.start(rank, method, partial(_begin, worker, rank, processes, address, timeout_s, timing))
        ends = started.watch()
        first = cause(ends)
        if first is None:
            return max(end.result or 0 for end in ends)
        if -first.code in received:
            return _report_signal(-first.code)
        failure = first.failure or _silent(first, processes, started.memory(first.rank), logs)
    # All workers are gone by now: none prints after this.
    print(failure.words, file=sys.stderr)
    if failed:
        failed(failure)
    return failure.exit_code


def cause(ends: Sequence[End]) -> End | None:
    """Return the end of the worker that failed first of its own accord; None where all have done their work.

    Who only lost another rank is the cause where no other is known.
    """
    failed = [end for end in ends if end.result is None]
    return min(failed, key=lambda end: (end.secondary, end.failure.time if end.failure else end.time), default=None)


def check_loopback(timing: Timing = TIMING) -> None:
    """Raise PreflightError where processes of this machine cannot reach each other."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            socket.create_connection(listening.getsockname(), timeout=timing.loopback_s).close()
    except OSError as error:
        if too_many_files(error):
            raise limit_error("connect to itself", error) from error
        raise PreflightError(
            f"the loopback interface does not work ({error.strerror or error}), and the processes of a run on one "
            f"machine talk over it; switch it on (ip link set {ports.loopback()} up)"
        ) from error


@dataclass
class _Process:
    """A worker: its process, a descriptor that is readable once it ended, and the pipe by which it reports."""

    process: BaseProcess
    ending: int  # a descriptor that can be read once the process has ended
    words: Connection
    end: End | None = None
    peak: int = 0  # bytes of memory, the most that was seen


@final
class _Started:
    """The workers that were started, by rank."""

    def __init__(self, timing: Timing) -> None:
        self._workers: list[_Process] = []
        self._timing = timing
        self._killed = oom.Killed(round(timing.memory_s / timing.watch_s))

    def start(self, rank: int, method: Literal["fork", "spawn"], body: Callable[[Connection], None]) -> None:
        """Start the next worker."""
        fork = method == "fork"
        context = multiprocessing.get_context("fork") if fork else multiprocessing.get_context("spawn")
        try:
            words, theirs = context.Pipe(duplex=False)
            with theirs:
                process = context.Process(target=body, args=(theirs,))
                process.start()
                self._workers.append(_Process(process, _ending(process), words))
        except OSError as error:
            raise limit_error(f"start rank {rank}", error) from error

    def watch(self) -> list[End]:
        """Return how the workers ended: all of them, or, where one fails, those that have ended when that is clear."""
        clear_at = float("inf")
        while running := [worker for worker in self._workers if worker.end is None]:
            wait([worker.ending for worker in running], self._timing.watch_s)
            for rank, worker in enumerate(self._workers):
                if worker.end is None:
                    worker.peak = max(worker.peak, oom.peak_bytes(worker.process.pid or 0))
                    worker.end = _end_of(rank, worker)
            first = cause(self.ends)
            if first is None:
                self._killed.look()
            elif not first.secondary:
                break
            else:
                clear_at = min(clear_at, time.monotonic() + self._timing.cause_s)
                if time.monotonic() >= clear_at:
                    break
        return self.ends

    @property
    def ends(self) -> list[End]:
        return [worker.end for worker in self._workers if worker.end]

    def memory(self, rank: int) -> str:
        """Say what memory a worker had that was killed, and whether memory ran out."""
        return self._killed.words(self._workers[rank].peak)

    def signal(self, number: int) -> bool:
        """Send a signal to the workers that run; return whether any were ever started."""
        for worker in self._workers:
            with suppress(ProcessLookupError):
                _send(worker, number)
        return bool(self._workers)

    def end(self) -> None:
        """End the workers that still run: one may be stopped, and not even hear of it."""
        self.signal(signal.SIGTERM)
        until = time.monotonic() + self._timing.stop_s
        for worker in self._workers:
            wait([worker.ending], max(0.0, until - time.monotonic()))
        self.signal(signal.SIGKILL)
        for worker in self._workers:
            worker.process.join(self._timing.stop_s)  # one that waits for a device or a disk may not even be killed
            worker.words.close()
            os.close(worker.ending)


def _ending(process: BaseProcess) -> int:
    """Return a descriptor that can be read once a process has ended."""
    try:
        return os.pidfd_open(process.pid or 0)
    except AttributeError:  # not Linux; this one is open for as long as any process that the rank started
        return os.dup(process.sentinel)


def _send(worker: _Process, number: int) -> None:
    try:
        signal.pidfd_send_signal(worker.ending, number)
    except AttributeError:  # not Linux
        if worker.process.exitcode is None and worker.process.pid:
            os.kill(worker.process.pid, number)


def _end_of(rank: int, worker: _Process) -> End | None:
    """Return how a worker ended; None where it runs."""
    code = worker.process.exitcode
    if code is None:
        return None
    said = b""
    os.set_blocking(worker.words.fileno(), False)  # a loader process that is left may hold its other end
    with suppress(BlockingIOError):
        while part := os.read(worker.words.fileno(), _PIPE):
            said += part
    now = time.time()
    if said.startswith(_DONE):  # whatever became of the process after its work
        return End(rank, code, now, result=int(said.removeprefix(_DONE)))
    with suppress(ValueError):  # killed while it spoke
        return End(rank, code, now, failure=from_json(said))
    return End(rank, code, now)


def _begin(
    worker: Worker, rank: int, size: int, address: str, timeout_s: float, timing: Timing, words: Connection
) -> None:
    """Run in the worker's process: stay tied to the agent and out of the terminal's reach."""
    die_with_parent()
    # Ctrl-C goes to the whole process group. In one of their own, workers hear of it once, from the agent.
    os.setpgid(0, 0)
    for number in stopping():  # a fork brought the agent's way with them, a spawn Python's
        signal.signal(number, signal.SIG_DFL)
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}  # a model may ask
    os.environ.update({name: str(number) for name, number in numbers.items()})
    info = RankInfo(rank, size, rank, size, "lockstep")
    rendezvous = Rendezvous(info, timeout_s, partial(_end, words), timing=timing)
    # The terminal's streams are those of a spawned process: a forked one has its parent's.
    with member(rendezvous, address), outliving_terminal():
        code = worker(rendezvous)
    os.write(words.fileno(), _DONE + str(code).encode())


def _end(words: Connection, rendezvous: Rendezvous, failure: Failure) -> NoReturn:
    def report(rendezvous: Rendezvous, failure: Failure) -> None:
        os.write(words.fileno(), failure.to_json().encode())  # first: it needs no store
        rendezvous.fail(failure)
        sys.stdout.flush()

    end_process(rendezvous, failure, report)


def _silent(end: End, size: int, memory: str, logs: Path | None) -> Failure:
    """Return the failure of a worker that ended without a report."""
    if end.code < 0:
        how = f"was killed by {signal.Signals(-end.code).name}{f' ({memory})' if memory else ''}"
    else:
        how = f"exited with code {end.code} before its work was done"
    advice = "Start again with the same run.dir to resume from the last checkpoint"
    log = str(logs / log_name(end.rank)) if logs else ""
    text = f"error: {how}; the other ranks were stopped. {advice}"
    cause: Cause = "host" if oom.KILLED in memory else "transient" if end.code == -signal.SIGKILL else "code"
    return Failure(end.rank, size, socket.gethostname(), text, EXIT_FAILED, log=log, cause=cause)


def _report_signal(number: int) -> int:
    """Say which signal ended a run that had not begun to train, and return the exit code, as shells count."""
    print(f"ended by {signal.Signals(number).name}", file=sys.stderr)
    return 128 + number


@contextmanager
def _nameless_file() -> Iterator[str]:
    """Yield where the workers meet: a file in memory that nobody can remove, and that is gone with this process."""
    try:
        descriptor = os.memfd_create("lockstep")
    except AttributeError:  # not Linux: a file that has a name, and needs a disk
        with TemporaryDirectory(prefix="lockstep-", ignore_cleanup_errors=True) as folder:
            yield f"file://{folder}/store"
        return
    except OSError as error:
        raise limit_error("open a file in memory", error) from error
    try:
        yield f"file:///proc/{os.getpid()}/fd/{descriptor}"
    finally:
        os.close(descriptor)


@contextmanager
def _relay_signals(started: _Started) -> Iterator[list[int]]:
    """Pass the signals that stop a run on to the workers while the block runs; yield those that came so far."""
    received: list[int] = []
    agent = os.getpid()

    def relay(number: int, _frame: FrameType | None) -> None:
        if os.getpid() != agent:  # a worker that has not begun
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        received.append(number)
        at_once = received.count(signal.SIGINT) > 1
        if not started.signal(signal.SIGKILL if at_once else number):
            raise SystemExit(_report_signal(number))
        if at_once:
            os._exit(EXIT_INTERRUPTED)

    before = {number: signal.signal(number, relay) for number in stopping()}
    try:
        yield received
    finally:
        for number, action in before.items():
            signal.signal(number, action)
