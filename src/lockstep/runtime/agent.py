"""Starts the processes of a run on this machine with torch's elastic agent, and ends all when one fails.

Nothing listens on the network for it: the agent and the workers meet in files of a private folder, and gloo talks
over the loopback interface.
"""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Final, Literal, NoReturn

from lockstep.errors import EXIT_FAILED, EXIT_INTERRUPTED, LockstepError
from lockstep.parent import die_with_parent
from lockstep.runtime.peers import PeerLostError
from lockstep.runtime.signals import STOPPING

Worker = Callable[[str], int]  # takes the rendezvous, returns the exit code

_FAILURES: Final = "LOCKSTEP_FAILURES"  # names the folder where a worker of ours says why it ended
_PATIENCE_S: Final = 1.0  # ten looks of the agent at its workers


@dataclass(frozen=True)
class Failure:
    """What a rank said before it ended: written to a file, so that the first of all can be shown first."""

    rank: int
    time: float
    text: str
    exit_code: int
    peer_lost: bool


def run_workers(worker: Worker, processes: int, method: Literal["fork", "spawn"]) -> int:
    """Run `worker` in so many processes and return the exit code of the run.

    Signals that stop a run go on to the workers: one that knows StopRequest goes on to a step boundary, any other ends.
    A second SIGINT kills them. The failure that came first is printed; the others, which only lost a peer, are not.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in ("torch.distributed.elastic", "torch.multiprocessing"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # we say ourselves what went wrong
    with tempfile.TemporaryDirectory(prefix="lockstep-") as folder, _relayed_signals(folder) as received:
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
            codes = elastic_launch(config, _begin)(worker, folder)
        except ChildFailedError as error:
            first = error.get_first_failure()[1]
            if -first.exitcode in received:
                return _ended_by(-first.exitcode)
            return _explain(Path(folder), processes, first.local_rank, first.exitcode)
        return max(int(code) for code in codes.values())


def die_with_launcher(launcher: str) -> None:
    """End with torchrun or mpirun, should that be killed; one started by hand may outlive its shell, as with nohup."""
    if launcher in ("torchrun", "openmpi", "hydra"):
        die_with_parent()


def describe(error: BaseException) -> str:
    """Return what to tell the user of an error: the text of ours, the traceback of any other."""
    if isinstance(error, LockstepError):
        return f"error: {error}"
    return "".join(traceback.format_exception(error)).rstrip()


def _begin(worker: Worker, folder: str) -> int:
    """Run in the worker's process: stay tied to the agent and out of the terminal's reach."""
    die_with_parent()
    # Ctrl-C goes to the whole process group. In one of their own, workers hear of it once, from the agent.
    os.setpgid(0, 0)
    for number in STOPPING:  # a fork brought the agent's way with them, a spawn Python's
        signal.signal(number, signal.SIG_DFL)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback())
    rank = int(os.environ["RANK"])
    os.environ[_FAILURES] = folder
    try:
        return worker(f"file://{folder}/workers")
    except BaseException as error:
        code = error.exit_code if isinstance(error, LockstepError) else EXIT_FAILED
        failure = Failure(rank, time.time(), describe(error), code, isinstance(error, PeerLostError))
        _note(failure, folder)
        sys.stdout.flush()
        if failure.peer_lost:
            _let_the_cause_be_seen()
        os._exit(code)  # not by the agent's own way, which prints a traceback


def end_at_once(rank: int, text: str) -> NoReturn:
    """End this process for the reason `text`, from whatever thread: the main one may be where nothing reaches it."""
    folder = os.environ.get(_FAILURES)
    if folder:
        _note(Failure(rank, time.time(), text, EXIT_FAILED, peer_lost=False), folder)
    else:
        print(text, file=sys.stderr, flush=True)
    os._exit(EXIT_FAILED)


def _note(failure: Failure, folder: str) -> None:
    (Path(folder) / f"rank-{failure.rank}.json").write_text(json.dumps(asdict(failure)), encoding="utf-8")


def _let_the_cause_be_seen() -> None:
    """Wait to be ended by the agent: of two that fail it tells one, and that is not to be the one that lost a peer."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(_PATIENCE_S)


def _explain(folder: Path, processes: int, rank: int, code: int) -> int:
    """Print the first failure that has a cause of its own, and return its exit code.

    `rank` ended with `code` before any other, as far as the agent saw. A rank that was killed could not say why.
    """
    said = [Failure(**json.loads(file.read_text(encoding="utf-8"))) for file in folder.glob("rank-*.json")]
    said.sort(key=lambda failure: (failure.peer_lost, failure.time))
    if said and (not said[0].peer_lost or rank in {failure.rank for failure in said}):
        print(f"[rank {said[0].rank} of {processes}, {socket.gethostname()}] {said[0].text}", file=sys.stderr)
        return said[0].exit_code
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended without a word, with exit code {code}"
    print(
        f"error: [rank {rank} of {processes}, {socket.gethostname()}] {how}; the other ranks were stopped. "
        f"Start again with the same run.dir to go on from the last checkpoint",
        file=sys.stderr,
    )
    return EXIT_FAILED


def _ended_by(number: int) -> int:
    """Say which signal ended a run that had not begun to train, and return the exit code, as shells count."""
    print(f"ended by {signal.Signals(number).name}", file=sys.stderr)
    return 128 + number


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
            with contextlib.suppress(ProcessLookupError):
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
