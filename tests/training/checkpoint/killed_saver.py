"""Kill a process that saves checkpoints, many times, and check what it leaves; run by test_store.py.

A program of its own, so that torch is imported once and the forks come from a process with one thread.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from lockstep.training.checkpoint import store
from lockstep.training.checkpoint.store import Snapshot


def snapshot(step: int) -> Snapshot:
    weights = torch.full((20_000,), float(step))
    return Snapshot({"w": weights}, {"w/momentum": weights + 1}, None, {"step": step})


def save_until_killed(folder: Path, first: int, acknowledged: int) -> None:
    step = first
    while True:
        # Each step twice: the second time it replaces the first.
        for _ in range(2):
            store.save(folder, step, snapshot(step), keep=2, best=step % 5 == 0)
            os.write(acknowledged, step.to_bytes(8, "little"))
        step += 1


def one_kill(folder: Path, first: int, saves: int, wait_s: float) -> int:
    """Kill a child some time after so many saves; return the last step that it saw saved, or that before `first`."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        save_until_killed(folder, first, write)
    os.close(write)
    said = b"".join(os.read(read, 8) for _ in range(saves))
    time.sleep(wait_s)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with os.fdopen(read, "rb") as pipe:
        said += pipe.read()
    return int.from_bytes(said[-8:], "little") if said else first - 1


def main(folder: Path, kills: int) -> None:
    torch.set_num_threads(1)
    draw = random.Random(0)
    saved = 0
    for _ in range(kills):
        last = one_kill(folder, saved + 1, draw.randrange(5), draw.uniform(0, 0.02))
        found = store.load_newest(folder)
        if found is None:
            assert last == 0, f"step {last} was saved, nothing is left"
            continue
        assert found.problems == [], found.problems
        saved = found.snapshot.state["step"]
        assert saved in (last, last + 1), f"step {last} was saved, step {saved} is left"
        assert found.snapshot.model["w"].equal(torch.full((20_000,), float(saved)))
    print(f"{kills} kills, step {saved}")
    assert saved > 0


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
