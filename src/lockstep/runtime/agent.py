"""Starts the processes of a run on this machine with torch's elastic agent, and ends all when one fails.

Nothing listens on the network for it: the agent and the workers meet in files of a private folder, and gloo talks
over the loopback interface. A disk that is full may be why a worker ends, so the folder is in memory, where there is
such a place, and its last words come through a pipe.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Final, Literal, NoReturn

from lockstep.core.rank import RankInfo
from lockstep.errors import EXIT_FAILED, EXIT_INTERRUPTED
from lockstep.parent import die_with_parent
from lockstep.runtime import oom
from lockstep.runtime.failure import Failure, failure_of, from_json
from lockstep.runtime.meeting import Meeting
from lockstep.runtime.signals import STOPPING
from lockstep.runtime.voice import log_name

Worker = Callable[[Meeting], int]  # returns the exit code

_MEMORY: Final = Path("/dev/shm")  # torch's agent needs it too, for its semaphores
_PATIENCE_S: Final = 1.0  # ten looks of the agent at its workers
_LOOK_S: Final = 0.5
_GRACE_S: Final = 5.0  # for workers to end once one has failed: less than torch gives them
_LAST_WORDS: Final = 8_000  # characters, of which JSON makes six each at most: a pipe takes 64 KiB that nobody reads


def run_workers(
    worker: Worker,
    processes: int,
    method: Literal["fork", "spawn"],
    timeout_s: float,
    logs: Path | None = None,
) -> int:
    """Run `worker` in so many processes, each with all others met, and return the exit code of the run.

    `logs` has the logs of the ranks, if they keep any, for the message of one that was killed.

    Signals that stop a run go on to the workers: one that knows StopRequest goes on to a step boundary, any other ends.
    A second SIGINT kills them. The failure that came first is printed; the others, which only lost a peer, are not.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in ("torch.distributed.elastic", "torch.multiprocessing"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # we say ourselves what went wrong
    killed = oom.Killed()
    heard, told = zip(*(multiprocessing.Pipe(duplex=False) for _ in range(processes)), strict=True)
    with (
        tempfile.TemporaryDirectory(prefix=f"lockstep-{os.getpid()}-", dir=_in_memory()) as folder,
        _relayed_signals(folder) as received,
        _watched(killed) as peaks,
    ):
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint=f"{folder}/agent",
            rdzv_configs={"store_type": "file"},
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=folder),  # left out, torch makes a folder and leaves it behind
            start_method=method,
            local_addr="127.0.0.1",
            signals_to_handle="SIGQUIT",  # those that stop a run are ours
        )
        try:
            codes = elastic_launch(config, _begin)(worker, folder, told, timeout_s)
        except ChildFailedError as error:
            first = error.get_first_failure()[1]
            if -first.exitcode in received:
                return _ended_by(-first.exitcode)
            memory = killed.words(peaks.get(first.pid, 0))
            for pipe in told:  # else a message of which a part has come would be waited for
                pipe.close()
            return _explain(_heard(heard), processes, first.local_rank, first.exitcode, memory, logs)
        return max(int(code) for code in codes.values())


def _in_memory() -> Path | None:
    """Return a place in memory for a folder; None where there is none, and the usual one has to do."""
    return _MEMORY if os.access(_MEMORY, os.W_OK) else None


def _begin(worker: Worker, folder: str, told: Sequence[Connection], timeout_s: float) -> int:
    """Run in the worker's process: stay tied to the agent and out of the terminal's reach."""
    die_with_parent()
    # Ctrl-C goes to the whole process group. In one of their own, workers hear of it once, from the agent.
    os.setpgid(0, 0)
    for number in (*STOPPING, signal.SIGALRM):  # a fork brought the agent's way with them, a spawn Python's
        signal.signal(number, signal.SIG_DFL)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback())
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    meeting = Meeting(RankInfo(rank, size, rank, size, "lockstep"), timeout_s, partial(_end, told[rank]))
    try:
        meeting.join(f"file://{folder}/workers")
        return worker(meeting)
    except BaseException as error:
        meeting.end(failure_of(error, meeting.info, meeting.voice))  # torch's own way prints a traceback


def _end(told: Connection, meeting: Meeting, failure: Failure) -> NoReturn:
    """End this worker; what there is to say, the agent says."""
    try:
        told.send_bytes(replace(failure, text=failure.text[-_LAST_WORDS:]).to_json().encode())
        meeting.fail(failure)
        sys.stdout.flush()
        if failure.secondary:
            _let_the_cause_be_seen()
    finally:  # whatever becomes of its last words
        os._exit(failure.exit_code)


def _let_the_cause_be_seen() -> None:
    """Wait to be ended by the agent: of two that fail it tells one, and that is not to be the one that lost a peer."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(_PATIENCE_S)


def _heard(pipes: Iterable[Connection]) -> list[Failure]:
    """Return what the workers, all of them gone, had to say."""
    failures = []
    for pipe in pipes:
        with suppress(EOFError, OSError):  # killed while it spoke
            if pipe.poll():
                failures.append(from_json(pipe.recv_bytes()))
    return failures


def _explain(said: list[Failure], processes: int, rank: int, code: int, memory: str, logs: Path | None) -> int:
    """Print the first failure that has a cause of its own, and return its exit code.

    `rank` ended with `code` before any other, as far as the agent saw. A rank that was killed could not say why; then
    `memory` tells what it had.
    """
    said.sort(key=lambda failure: (failure.secondary, failure.time))
    if said and (not said[0].secondary or rank in {failure.rank for failure in said}):
        print(said[0].words, file=sys.stderr)
        return said[0].exit_code
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended without a word, with exit code {code}"
    how += f" ({memory})" if memory else ""
    advice = "Start again with the same run.dir to go on from the last checkpoint"
    log = str(logs / log_name(rank)) if logs else ""
    text = f"error: {how}; the other ranks were stopped. {advice}"
    print(Failure(rank, processes, socket.gethostname(), text, log=log).words, file=sys.stderr)
    return EXIT_FAILED


def _ended_by(number: int) -> int:
    """Say which signal ended a run that had not begun to train, and return the exit code, as shells count."""
    print(f"ended by {signal.Signals(number).name}", file=sys.stderr)
    return 128 + number


@contextmanager
def _watched(killed: oom.Killed) -> Iterator[dict[int, int]]:
    """While the block runs, note how much memory each worker, by its pid, has had; it is yielded, in bytes.

    Also kill workers that do not end though another has failed: one that is stopped, for example. torch asks them to
    end and waits for half a minute. A timer looks, and no thread: those do not go well with forks.
    """
    peaks: dict[int, int] = {}
    workers: dict[int, BaseProcess] = {}
    failed_at: list[float] = []

    def look(_number: int, _frame: FrameType | None) -> None:
        workers.update({worker.pid or 0: worker for worker in multiprocessing.active_children()})
        for pid in workers:
            peaks[pid] = max(oom.peak_bytes(pid), peaks.get(pid, 0))
        if not any(worker.exitcode for worker in workers.values()):
            killed.look()
        else:
            failed_at.append(time.monotonic())
            if failed_at[-1] - failed_at[0] >= _GRACE_S:
                for worker in workers.values():
                    worker.kill()

    before = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, _LOOK_S, _LOOK_S)
    try:
        yield peaks
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def _relayed_signals(folder: str) -> Iterator[list[int]]:
    """Pass the signals that stop a run on to the workers while the block runs; yield those that came so far."""
    received: list[int] = []
    agent = os.getpid()

    def relay(number: int, _frame: FrameType | None) -> None:
        if os.getpid() != agent:  # a worker that has not begun
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        received.append(number)
        workers = multiprocessing.active_children()
        if not workers:
            raise SystemExit(_ended_by(number))
        at_once = received.count(signal.SIGINT) > 1
        for worker in workers:
            with suppress(ProcessLookupError):
                os.kill(worker.pid or 0, signal.SIGKILL if at_once else number)
        if at_once:
            shutil.rmtree(folder, ignore_errors=True)
            os._exit(EXIT_INTERRUPTED)

    before = {number: signal.signal(number, relay) for number in STOPPING}
    try:
        yield received
    finally:
        for number, action in before.items():
            signal.signal(number, action)


def _loopback() -> str:
    return "lo" if "lo" in (name for _, name in socket.if_nameindex()) else "lo0"
