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
from typing import Literal

from lockstep.errors import EXIT_FAILED, EXIT_INTERRUPTED, LockstepError
from lockstep.parent import die_with_parent
from lockstep.runtime.peers import PeerLostError

Worker = Callable[[str], int]  # takes the rendezvous, returns the exit code


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

    SIGINT and SIGTERM go on to the workers, which decide at a step boundary; a second SIGINT kills them. The failure
    that came first is printed, and the others, which only lost a peer, are not.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # we say ourselves what went wrong
    with tempfile.TemporaryDirectory(prefix="lockstep-") as folder, _forwarded_signals():
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint=f"{folder}/agent",
            rdzv_configs={"store_type": "file"},
            max_restarts=0,
            start_method=method,
            local_addr="127.0.0.1",
            signals_to_handle="SIGQUIT",  # SIGINT and SIGTERM are ours
        )
        try:
            codes = elastic_launch(config, _begin)(worker, folder)
        except ChildFailedError as error:
            first = error.get_first_failure()[1]
            return _explain(Path(folder), processes, first.local_rank, first.exitcode)
        return max(int(code) for code in codes.values())


def die_with_launcher(launcher: str) -> None:
    """End with torchrun, should that be killed; a process started by hand may outlive its shell, as with nohup."""
    if launcher == "torchrun":
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
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback())
    rank = int(os.environ["RANK"])
    try:
        return worker(f"file://{folder}/workers")
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BaseException as error:
        code = error.exit_code if isinstance(error, LockstepError) else EXIT_FAILED
        failure = Failure(rank, time.time(), describe(error), code, isinstance(error, PeerLostError))
        (Path(folder) / f"rank-{rank}.json").write_text(json.dumps(asdict(failure)), encoding="utf-8")
        sys.stdout.flush()
        os._exit(code)  # not by the agent's own way, which prints a traceback


def _explain(folder: Path, processes: int, rank: int, code: int) -> int:
    """Print the first failure that has a cause of its own, and return its exit code."""
    failures = [Failure(**json.loads(file.read_text(encoding="utf-8"))) for file in folder.glob("rank-*.json")]
    causes = sorted((each for each in failures if not each.peer_lost), key=lambda each: each.time)
    if causes:
        print(
            f"[rank {causes[0].rank} of {processes}, {socket.gethostname()}] {causes[0].text}",
            file=sys.stderr,
        )
        return causes[0].exit_code
    silent = sorted(set(range(processes)) - {each.rank for each in failures})
    lost = rank if rank in silent else silent[0] if silent else rank
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 and rank == lost else "ended without a word"
    print(
        f"error: [rank {lost} of {processes}, {socket.gethostname()}] {how}; the other ranks were stopped. "
        f"Start the same command again to go on from the last checkpoint",
        file=sys.stderr,
    )
    return EXIT_FAILED


@contextmanager
def _forwarded_signals() -> Iterator[None]:
    """Pass SIGINT and SIGTERM on to the workers while the block runs."""
    interrupts = 0

    def forward(number: int, _frame: FrameType | None) -> None:
        nonlocal interrupts
        interrupts += number == signal.SIGINT
        for child in multiprocessing.active_children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid or 0, signal.SIGKILL if interrupts > 1 else number)
        if interrupts > 1:
            os._exit(EXIT_INTERRUPTED)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, action in before.items():
            signal.signal(number, action)


def _loopback() -> str:
    return "lo" if "lo" in (name for _, name in socket.if_nameindex()) else "lo0"
