"""A warm pool of worker processes, one for each size of world: gloo over the loopback interface.

    def share(world: World, value: int) -> int: ...
    assert run(3, share, 5) == [...]  # by rank

Workers are forked once and kept, since starting a process group takes longer than most tests. They come out of a
*nursery*, a process forked before the first test, so that no thread, handler or CUDA context of a test is inherited.
Whatever happens, they end with the session: each dies with the nursery, and that with pytest.
"""

import contextlib
import gc
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from lockstep.comm.world import open_world
from lockstep.common.follow_parent import die_with_parent
from lockstep.common.rank import RankInfo
from lockstep.device.precision import select_deterministic_kernels
from lockstep.ranks.external import join_ranks

LARGEST_BYTES = 350 << 20  # of a worker's own memory, of which DeepSpeed takes 300 MiB: a larger pool is ended
GRACE_S = 1.0  # for the other ranks, once one has failed: most of them wait in vain in an exchange
START_S = 120.0
ENDLESS_S = 86400.0  # of an exchange: one under way while its pool is stopped may not find its time over afterwards


class WorldError(Exception):
    """A rank raised, died or did not answer; `answers` holds what the others returned."""

    def __init__(self, text: str, answers: dict[int, Any]) -> None:
        super().__init__(text)
        self.answers = answers


@dataclass
class _Worker:
    """A rank's process, seen from pytest. `pid` is known once it has called."""

    connection: Connection
    pid: int


@dataclass
class _Session:
    """What one pytest process holds; an xdist worker has its own."""

    nursery: Connection | None = None
    nursery_pid: int = 0
    folder: tempfile.TemporaryDirectory[str] | None = None
    pools: dict[int, list[_Worker]] = field(default_factory=dict)


_session = _Session()


def run(size: int, function: Callable[..., Any], *args: Any, timeout: float = 300.0) -> list[Any]:
    """Call `function(world, *args)` on every rank of a world of `size` and return the results by rank.

    `function` stands at the top of a test module. What it raises comes back in a WorldError with the traceback's
    text; then, and where a rank does not answer within `timeout` seconds, the pool of that size is built anew.
    """
    pool = _pool(size)
    _signal(pool, signal.SIGCONT)
    for worker in pool:
        _send(worker.connection, (function, args))
    answers, failures = _collect(pool, timeout)
    # Each group of gloo has a thread that wakes up 100 times a second, and a worker has a dozen: in 60 processes that
    # waited for work they took half of two cores.
    _signal(pool, signal.SIGSTOP)
    if failures or any(_own_bytes(worker.pid) > LARGEST_BYTES for worker in pool):
        _kill(size)
    if failures:
        raise WorldError("\n".join(failures), answers)
    return [answers[rank] for rank in range(size)]


def pids(size: int) -> list[int]:
    """Return the processes of a world, by rank."""
    return [worker.pid for worker in _pool(size)]


def schedule_as_batch() -> None:
    """Let nothing that is woken interrupt what runs, in this process and all its children: as `chrt --batch` does.

    gloo's thread, woken by an answer, would else take the core of the thread that sends and holds the lock it needs,
    and spin. A model in chunks on two ranks takes a quarter of the CPU time, on two cores.
    """
    if sys.platform == "linux":
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def open_nursery(imports: Sequence[str] = ()) -> None:
    """Fork the nursery, which imports these modules for all workers; call before any test."""
    schedule_as_batch()
    ours, theirs = Pipe()
    _session.folder = tempfile.TemporaryDirectory(prefix="worlds-")
    _session.nursery_pid = os.fork()
    if not _session.nursery_pid:
        ours.close()
        _end_with(_nurse, theirs, imports)
    theirs.close()
    _session.nursery = ours


def close_nursery() -> None:
    """End all workers and the nursery, and wait until they are gone."""
    if _session.nursery is None:
        return
    for size in list(_session.pools):
        _kill(size)
    _session.nursery.close()
    os.waitpid(_session.nursery_pid, 0)
    _session.nursery = None
    if _session.folder is not None:
        _session.folder.cleanup()


def _collect(pool: list[_Worker], timeout: float) -> tuple[dict[int, Any], list[str]]:
    answers: dict[int, Any] = {}
    failures: list[str] = []
    ranks = {worker.connection: rank for rank, worker in enumerate(pool)}
    deadline = time.monotonic() + timeout
    while ranks:
        ready = wait(list(ranks), max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for connection in ready:
            rank = ranks.pop(connection)
            done, value = _answer(connection)
            if done:
                answers[rank] = value
            else:
                failures.append(f"rank {rank} of {len(pool)}: {value}")
                deadline = min(deadline, time.monotonic() + GRACE_S)
    if ranks:
        silent = ", ".join(map(str, sorted(ranks.values())))
        when = "after that" if failures else f"within {timeout:g} s"
        failures.append(f"rank {silent} of {len(pool)}: no answer {when}")
    return answers, failures


def _answer(connection: Connection) -> tuple[bool, Any]:
    try:
        done, value = _receive(connection)
    except (EOFError, ConnectionResetError):
        return False, "the process died"
    return done, value


def _pool(size: int) -> list[_Worker]:
    if size not in _session.pools:
        _session.pools[size] = _start(size)
    return _session.pools[size]


def _start(size: int) -> list[_Worker]:
    assert _session.nursery is not None, "mark the test with @pytest.mark.worlds"
    folder = Path(tempfile.mkdtemp(dir=_session.folder.name))
    with Listener(str(folder / "calls"), "AF_UNIX", backlog=size) as listener:
        _session.nursery.send((size, str(folder)))
        callers = [listener.accept() for _ in range(size)]
    pool = {}
    for connection in callers:
        assert connection.poll(START_S), f"a world of {size} did not start"
        rank, pid = _receive(connection)
        pool[rank] = _Worker(connection, pid)
    return [pool[rank] for rank in range(size)]


def _own_bytes(pid: int) -> int:
    """Return the memory that a process shares with no other: workers share what the nursery has imported."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Private_Dirty:"):
                return int(line.split()[1]) * 1024
    return 0


def _kill(size: int) -> None:
    pool = _session.pools.pop(size)
    _signal(pool, signal.SIGKILL)
    for worker in pool:
        worker.connection.close()


def _signal(pool: Sequence[_Worker], number: int) -> None:
    for worker in pool:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.pid, number)


def _end_with(function: Callable[..., None], *args: Any) -> NoReturn:
    """Be a forked process: never return into the pytest that it is a copy of."""
    try:
        function(*args)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _nurse(requests: Connection, imports: Sequence[str]) -> None:
    """Fork workers on request until pytest hangs up, or is gone."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; pytest decides
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the dead
    select_deterministic_kernels(
        num_threads=1
    )  # here, as the line below, because it imports for seconds, and workers inherit it
    for module in ("timm.optim", *imports):
        import_module(module)
    gc.freeze()  # as what pytest has imported
    while True:
        try:
            size, folder = requests.recv()
        except EOFError:
            return
        for rank in range(size):
            if not os.fork():
                requests.close()
                _end_with(_work, rank, size, Path(folder))


def _work(rank: int, size: int, folder: Path) -> None:
    """Be rank `rank`: meet the others, then answer one request after the other."""
    die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # After a fork torch makes its pool of threads anew at first use, and aborts where two threads use it first at once.
    select_deterministic_kernels(num_threads=1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    connection = Client(str(folder / "calls"), "AF_UNIX")
    info = RankInfo(rank, size, rank, size, "pool")
    world = open_world(join_ranks(info, f"file://{folder}/store", timeout_s=ENDLESS_S), torch.device("cpu"))
    _send(connection, (rank, os.getpid()))
    kept: set[dist.ProcessGroup] = set(_world.pg_map)
    while True:
        try:
            function, args = _receive(connection)
        except EOFError:
            return
        # What the last function has made is closed, now that no rank is in it any more.
        if "deepspeed" not in sys.modules:  # which keeps those that it has made
            parts = {} if world._groups is None else world._groups._subgroups
            for group in set(_world.pg_map) - kept - {*parts.values()}:
                dist.destroy_process_group(group)
        torch.set_grad_enabled(True)  # a loop that was refused within no_grad may be suspended there
        try:
            _send(connection, (True, function(world, *args)))
        except BaseException:
            _send(connection, (False, traceback.format_exc()))


def _send(connection: Connection, value: Any) -> None:
    connection.send_bytes(pickle.dumps(value))  # not send: it would pass tensors as shared memory, which must be kept


def _receive(connection: Connection) -> Any:
    return pickle.loads(connection.recv_bytes())  # noqa: S301 - from a process of our own
