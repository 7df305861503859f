"""Starts the processes of a run on this machine. If a process fails, ends all processes and reports the first failure.

The launching process is called the agent. It requires no network port and no folder: the rendezvous store of the
workers is an unnamed file that the agent keeps open, and gloo only listens on the loopback interface (comm/world.py).
Each worker reports its result or failure through a pipe.
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
from lockstep.common.interrupts import InterruptCount
from lockstep.common.rank import RankInfo
from lockstep.device import ports
from lockstep.device.ulimits import find_open_files_error, make_limit_error
from lockstep.errors import EXIT_FAILED, EXIT_INTERRUPTED, Cause, PreflightError
from lockstep.ranks import oom
from lockstep.ranks.failure import Failure, parse_failure_json
from lockstep.ranks.member import end_process, run_as_member
from lockstep.ranks.rank_log import get_log_name, ignore_terminal_errors
from lockstep.ranks.rendezvous import Rendezvous
from lockstep.ranks.signals import get_stop_signals
from lockstep.ranks.timing import TIMING, Timing

Worker = Callable[[Rendezvous], int]  # returns the exit code

_READ_BYTES: Final = 1 << 16
_DONE_PREFIX: Final = b"done "


@dataclass(frozen=True)
class WorkerExit:
    """The exit of a worker process.

    - `exit_code`: the exit code, or -N if signal N killed the process.
    - `time`: when the agent noticed the exit, in seconds since 1970.
    - `reported_code`: the exit code that the worker reported after completing its work.
    - `failure`: the failure that the worker reported, if it didn't complete its work.

    If the worker was killed or called os._exit, `reported_code` and `failure` are None.
    """

    rank: int
    exit_code: int
    time: float
    reported_code: int | None = None
    failure: Failure | None = None

    @property
    def secondary(self) -> bool:
        """Whether the worker only ended because another rank failed."""
        return self.failure is not None and self.failure.secondary


def run_workers(
    worker: Worker,
    num_processes: int,
    method: Literal["fork", "spawn"],
    timeout_s: float,
    log_folder: Path | None = None,
    on_failure: Callable[[Failure], None] | None = None,
    timing: Timing = TIMING,
) -> int:
    """Start `num_processes` processes, which rendezvous and then call `worker`. Returns the exit code of the run.

    `log_folder` is the folder of the rank logs, or None. If a worker is killed, the error message contains the path of
    its log. `on_failure` is called with the failure that ended the run.

    Signals that stop a run are forwarded to the workers. A worker that uses StopRequest continues to the next step
    boundary. All other workers end immediately. A second SIGINT kills all workers. Only the first failure is printed,
    not the failures of workers that lost a peer as a result.
    """
    check_loopback(timing)
    workers = _Workers(timing)
    with ExitStack() as stack:
        received = stack.enter_context(_relay_signals(workers))
        address = stack.enter_context(_open_unnamed_file())
        # Stop the workers before the file is closed, because a worker waits forever for a file that doesn't exist.
        stack.callback(workers.stop)
        for rank in range(num_processes):
            num_earlier_signals = len(received)
            workers.start(rank, method, partial(_run_worker, worker, rank, num_processes, address, timeout_s, timing))
            # Forward the signals that arrived while the worker was starting, because they didn't reach it.
            for number in received[num_earlier_signals:]:
                workers.send_signal(number, rank)
        exits = workers.watch()
        first = find_first_failure(exits)
        if first is None:
            return max(worker_exit.reported_code or 0 for worker_exit in exits)
        if -first.exit_code in received:
            return _report_signal(-first.exit_code)
        failure = first.failure or _make_unreported_failure(
            first, num_processes, workers.describe_memory(first.rank), log_folder
        )
    # Print the failure last, after all workers have ended.
    print(failure.message, file=sys.stderr)
    if on_failure:
        on_failure(failure)
    return failure.exit_code


def find_first_failure(exits: Sequence[WorkerExit]) -> WorkerExit | None:
    """Return the exit of the worker that failed first, or None if all workers completed their work.

    Workers that ended because they lost a peer are only considered if no other worker failed.
    """
    failed_exits = [worker_exit for worker_exit in exits if worker_exit.reported_code is None]
    return min(
        failed_exits,
        key=lambda worker_exit: (
            worker_exit.secondary,
            worker_exit.failure.time if worker_exit.failure else worker_exit.time,
        ),
        default=None,
    )


def check_loopback(timing: Timing = TIMING) -> None:
    """Raise PreflightError if processes on this machine can't connect to each other."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            socket.create_connection(listening.getsockname(), timeout=timing.loopback_timeout_s).close()
    except OSError as error:
        if find_open_files_error(error):
            raise make_limit_error("connect to itself", error) from error
        raise PreflightError(
            f"the loopback interface does not work ({error.strerror or error}), but processes on one machine "
            f"communicate over it; enable it (ip link set {ports.get_loopback_name()} up)"
        ) from error


@dataclass
class _WorkerProcess:
    """The process of a worker, and the pipe through which the worker reports its result or failure."""

    process: BaseProcess
    exit_descriptor: int  # file descriptor, readable once the process has ended
    pipe: Connection
    worker_exit: WorkerExit | None = None
    peak_bytes: int = 0  # peak resident memory


@final
class _Workers:
    """The started workers, by rank."""

    def __init__(self, timing: Timing) -> None:
        self._workers: list[_WorkerProcess] = []
        self._timing = timing
        self._kill_detector = oom.KillDetector(round(timing.oom_window_s / timing.watch_s))
        self.is_starting = False

    def start(self, rank: int, method: Literal["fork", "spawn"], target: Callable[[Connection], None]) -> None:
        """Start the worker of rank `rank`, which must be the next rank."""
        self.is_starting = True
        fork = method == "fork"
        context = multiprocessing.get_context("fork") if fork else multiprocessing.get_context("spawn")
        try:
            pipe, worker_end = context.Pipe(duplex=False)
            with worker_end:
                process = context.Process(target=target, args=(worker_end,))
                process.start()
                self._workers.append(_WorkerProcess(process, _open_exit_descriptor(process), pipe))
        except OSError as error:
            raise make_limit_error(f"start rank {rank}", error) from error
        finally:
            self.is_starting = False

    def watch(self) -> list[WorkerExit]:
        """Wait until all workers have ended or the first failure is known. Returns the exits of all ended workers.

        If a worker only ended because it lost a peer, this method waits up to `first_failure_wait_s` seconds for
        the exit of the worker that failed first.
        """
        deadline = float("inf")
        while running := [worker for worker in self._workers if worker.worker_exit is None]:
            wait([worker.exit_descriptor for worker in running], self._timing.watch_s)
            for rank, worker in enumerate(self._workers):
                if worker.worker_exit is None:
                    worker.peak_bytes = max(worker.peak_bytes, oom.get_peak_bytes(worker.process.pid or 0))
                    worker.worker_exit = _get_exit(rank, worker)
            first = find_first_failure(self.exits)
            if first is None:
                self._kill_detector.record_healthy()
            elif not first.secondary:
                break
            else:
                deadline = min(deadline, time.monotonic() + self._timing.first_failure_wait_s)
                if time.monotonic() >= deadline:
                    break
        return self.exits

    @property
    def exits(self) -> list[WorkerExit]:
        return [worker.worker_exit for worker in self._workers if worker.worker_exit]

    def describe_memory(self, rank: int) -> str:
        """Describe the peak memory of a killed worker, and whether the machine ran out of memory."""
        return self._kill_detector.describe_memory(self._workers[rank].peak_bytes)

    def send_signal(self, signal_number: int, first_rank: int = 0) -> bool:
        """Send a signal to all running workers from `first_rank` on. Returns whether any worker has been started."""
        for worker in self._workers[first_rank:]:
            with suppress(ProcessLookupError):
                _send_signal(worker, signal_number)
        return bool(self._workers)

    def stop(self) -> None:
        """End all running workers with SIGTERM and then with SIGKILL, since a stopped worker ignores SIGTERM."""
        self.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + self._timing.sigkill_delay_s
        for worker in self._workers:
            wait([worker.exit_descriptor], max(0.0, deadline - time.monotonic()))
        self.send_signal(signal.SIGKILL)
        for worker in self._workers:
            worker.process.join(self._timing.sigkill_delay_s)  # times out if the process waits for a device or disk
            worker.pipe.close()
            os.close(worker.exit_descriptor)


def _open_exit_descriptor(process: BaseProcess) -> int:
    """Return a file descriptor that becomes readable when the process ends."""
    try:
        return os.pidfd_open(process.pid or 0)
    except AttributeError:  # not Linux; child processes of the rank also keep this descriptor open
        return os.dup(process.sentinel)


def _send_signal(worker: _WorkerProcess, signal_number: int) -> None:
    try:
        signal.pidfd_send_signal(worker.exit_descriptor, signal_number)
    except AttributeError:  # not Linux
        if worker.process.exitcode is None and worker.process.pid:
            os.kill(worker.process.pid, signal_number)


def _get_exit(rank: int, worker: _WorkerProcess) -> WorkerExit | None:
    """Return the exit of a worker, or None if the worker is still running."""
    code = worker.process.exitcode
    if code is None:
        return None
    report = b""
    os.set_blocking(worker.pipe.fileno(), False)  # a leftover loader process may keep the pipe open
    with suppress(BlockingIOError):
        while part := os.read(worker.pipe.fileno(), _READ_BYTES):
            report += part
    end_time = time.time()
    if report.startswith(_DONE_PREFIX):  # the work is complete, so a later crash of the process doesn't matter
        return WorkerExit(rank, code, end_time, reported_code=int(report.removeprefix(_DONE_PREFIX)))
    with suppress(ValueError):  # the worker was killed while writing the report
        return WorkerExit(rank, code, end_time, failure=parse_failure_json(report))
    return WorkerExit(rank, code, end_time)


def _run_worker(
    worker: Worker, rank: int, size: int, address: str, timeout_s: float, timing: Timing, pipe: Connection
) -> None:
    """Join the other workers and call `worker`. This is the entry point of a worker process.

    The process is killed when the agent exits, and receives no signals from the terminal.
    """
    die_with_parent()
    # The terminal sends Ctrl-C to all processes in its process group. In a separate process group, a worker receives
    # the signal only once, from the agent.
    os.setpgid(0, 0)
    for number in get_stop_signals():  # a forked process inherits the handlers of the agent
        signal.signal(number, signal.SIG_DFL)
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}  # read by user code
    os.environ.update({name: str(number) for name, number in numbers.items()})
    info = RankInfo(rank, size, rank, size, "lockstep")
    rendezvous = Rendezvous(info, timeout_s, partial(_report_and_exit, pipe), timing=timing)
    # A forked process inherits the error-tolerant streams of its parent, but a spawned process doesn't.
    with run_as_member(rendezvous, address), ignore_terminal_errors():
        code = worker(rendezvous)
    os.write(pipe.fileno(), _DONE_PREFIX + str(code).encode())


def _report_and_exit(pipe: Connection, rendezvous: Rendezvous, failure: Failure) -> NoReturn:
    def report_failure(rendezvous: Rendezvous, failure: Failure) -> None:
        os.write(pipe.fileno(), failure.to_json().encode())  # write to the pipe first, because this needs no store
        rendezvous.report_failure(failure)
        sys.stdout.flush()

    end_process(rendezvous, failure, report_failure)


def _make_unreported_failure(
    worker_exit: WorkerExit, size: int, memory_description: str, log_folder: Path | None
) -> Failure:
    """Return the failure to report for a worker that ended without reporting a failure."""
    if worker_exit.exit_code < 0:
        suffix = f" ({memory_description})" if memory_description else ""
        end_text = f"was killed by {signal.Signals(-worker_exit.exit_code).name}{suffix}"
    else:
        end_text = f"exited with code {worker_exit.exit_code} before it finished"
    advice = "Start again with the same run folder to resume from the last checkpoint"
    log = str(log_folder / get_log_name(worker_exit.rank)) if log_folder else ""
    text = f"error: {end_text}; the other ranks were stopped. {advice}"
    cause: Cause = (
        "host"
        if oom.KILL_DESCRIPTION in memory_description
        else "transient"
        if worker_exit.exit_code == -signal.SIGKILL
        else "code"
    )
    return Failure(worker_exit.rank, size, socket.gethostname(), text, EXIT_FAILED, log=log, cause=cause)


def _report_signal(signal_number: int) -> int:
    """Print the name of the signal that ended the run. Returns the exit code that shells use: 128 + `signal_number`."""
    print(f"ended by {signal.Signals(signal_number).name}", file=sys.stderr)
    return 128 + signal_number


@contextmanager
def _open_unnamed_file() -> Iterator[str]:
    """Yield the rendezvous address of an in-memory file, which disappears when this process ends."""
    try:
        descriptor = os.memfd_create("lockstep")
    except AttributeError:  # only Linux has in-memory files; use a named file on disk
        with TemporaryDirectory(prefix="lockstep-", ignore_cleanup_errors=True) as folder:
            yield f"file://{folder}/store"
        return
    except OSError as error:
        raise make_limit_error("open a file in memory", error) from error
    try:
        yield f"file:///proc/{os.getpid()}/fd/{descriptor}"
    finally:
        os.close(descriptor)


@contextmanager
def _relay_signals(workers: _Workers) -> Iterator[list[int]]:
    """Forward signals that stop a run to the workers during the `with` block. Yields the list of received signals."""
    received: list[int] = []
    interrupts = InterruptCount()
    agent_pid = os.getpid()

    def relay(signal_number: int, _frame: FrameType | None) -> None:
        if os.getpid() != agent_pid:  # a forked worker that hasn't installed its own handlers yet
            signal.signal(signal_number, signal.SIG_DFL)
            os.kill(os.getpid(), signal_number)
        received.append(signal_number)
        kills_workers = signal_number == signal.SIGINT and interrupts.is_second()
        # Don't exit while a worker is being started, because that worker would keep running. Besides, Python ignores
        # a SystemExit that is raised in an at-fork callback, which this handler may interrupt.
        if not workers.send_signal(signal.SIGKILL if kills_workers else signal_number) and not workers.is_starting:
            raise SystemExit(_report_signal(signal_number))
        if kills_workers:
            os._exit(EXIT_INTERRUPTED)

    previous = {number: signal.signal(number, relay) for number in get_stop_signals()}
    try:
        yield received
    finally:
        for number, action in previous.items():
            signal.signal(number, action)
