"""The pool of worlds tells what went wrong, heals itself, and leaves no process behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import worlds
from waiting import until

from lockstep.comm.world import World

pytestmark = [pytest.mark.slow("runs whole commands"), pytest.mark.worlds]

INNER = """
import os
import pytest
import worlds

def pid(world): return os.getpid()

@pytest.mark.worlds
def test_inner():
    workers = [*worlds.run(2, pid), *worlds.run(3, pid)]
    print("PIDS", *workers, worlds._session.nursery_pid, flush=True)
    {after}
"""


def place(world: World, factor: int) -> int:
    return factor * world.rank + world.size


def summed(world: World) -> float:
    return float(world.add_(torch.tensor([float(world.rank)])))


def raising(world: World, rank: int) -> None:
    if world.rank == rank:
        raise ValueError("this went wrong")
    world.barrier()


def sleeping(world: World, rank: int) -> str:
    if world.rank == rank:
        time.sleep(60)
    return "awake"


def dying(world: World) -> str:
    if world.rank == 0:
        os._exit(7)
    return "alive"


begun: list[tuple[dist.Work, torch.Tensor]] = []  # in a worker: what one job has begun, for the next


def beginning(world: World) -> float:
    if not world.rank:
        own = torch.ones(1)
        begun.append((dist.all_reduce(own, async_op=True), own))
    return world.timeout_s


def ending(world: World) -> float:
    if world.rank:
        return float(world.add_(torch.ones(1)))
    work, own = begun.pop()
    work.wait()
    return own.item()


def scheduling(_: World) -> int:
    return os.sched_getscheduler(0)


@pytest.mark.skipif(sys.platform != "linux", reason="others have no such policies")
def test_what_is_woken_interrupts_no_rank() -> None:
    assert worlds.run(2, scheduling) == [os.SCHED_BATCH] * 2


@pytest.mark.parametrize("size", [1, 2, 3])
def test_results_come_by_rank(size: int) -> None:
    assert worlds.run(size, place, 10) == [10 * rank + size for rank in range(size)]
    assert worlds.run(size, summed) == [size * (size - 1) / 2] * size


def test_workers_are_kept() -> None:
    before = worlds.pids(2)
    worlds.run(2, summed)
    assert worlds.pids(2) == before


def test_an_exchange_goes_on_where_its_pool_was_stopped() -> None:
    for timeout_s in worlds.run(2, beginning):
        assert timeout_s > 3600  # the clock does not stop
    assert worlds.run(2, ending) == [2.0, 2.0]


def test_an_exception_names_its_rank_and_the_pool_heals() -> None:
    before = worlds.pids(2)
    with pytest.raises(worlds.WorldError, match=r"(?s)^rank 1 of 2: Traceback.*in raising.*went wrong"):
        worlds.run(2, raising, 1)
    assert worlds.run(2, summed) == [1.0, 1.0]
    assert not set(before) & set(worlds.pids(2))


def test_a_timeout_names_the_silent_ranks() -> None:
    before = worlds.pids(3)
    with pytest.raises(worlds.WorldError, match=r"^rank 1 of 3: no answer within 1\.5 s$") as caught:
        worlds.run(3, sleeping, 1, timeout=1.5)
    assert caught.value.answers == {0: "awake", 2: "awake"}
    _wait_until_gone(before)


def test_a_death_is_told() -> None:
    with pytest.raises(worlds.WorldError, match="rank 0 of 2: the process died") as caught:
        worlds.run(2, dying)
    assert caught.value.answers == {1: "alive"}


def test_nothing_is_left_after_the_session(tmp_path: Path) -> None:
    with _start_session(tmp_path, "assert True") as session:
        pids = _announced(session)
        assert "1 passed" in session.communicate()[0]
    _wait_until_gone(pids)


def test_nothing_is_left_after_a_kill(tmp_path: Path) -> None:
    with _start_session(tmp_path, "import time; time.sleep(60)") as session:
        pids = _announced(session)
        session.send_signal(signal.SIGKILL)
    _wait_until_gone(pids)


def _start_session(folder: Path, after: str) -> "subprocess.Popen[str]":
    (folder / "test_inner.py").write_text(INNER.format(after=after))
    here = Path(__file__).parent
    (folder / "conftest.py").write_text((here / "conftest.py").read_text())
    command = [sys.executable, "-m", "pytest", "-s", "-q", "-p", "no:cacheprovider", "--rootdir", str(folder)]
    ini = ["-c", str(here.parent / "pyproject.toml")]
    environment = {**os.environ, "PYTHONPATH": str(here)}
    return subprocess.Popen([*command, *ini, str(folder)], stdout=subprocess.PIPE, text=True, env=environment)


def _announced(session: "subprocess.Popen[str]") -> list[int]:
    for line in session.stdout:
        if line.startswith("PIDS"):
            return [int(word) for word in line.split()[1:]]
    raise AssertionError("the session ended before it named its processes")


def _wait_until_gone(pids: list[int]) -> None:
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 10)
