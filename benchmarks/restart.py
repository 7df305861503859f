"""From a rank that is killed to the next new step: digits under ddp, which `lockstep train` is to go on with.

The last rank gets SIGKILL between two checkpoints; once the command has ended, the same command is given again at once.
The time is that until a step is logged that no start had logged before: the lost steps are done again in it.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import psutil

from benchmarks.growth import last_step, until
from benchmarks.report import Result, Target, compare

SIZES: Final = (1, 2, 4, 8)
_TURNS: Final = 3
_SAVED: Final = 10  # steps from one checkpoint to the next
_KILLED: Final = 15  # after so many steps
_GOAL_S: Final = 10.0


def results(quick: bool) -> Iterator[Result]:
    """Kill and start again each number of ranks, in turns."""
    ended: dict[str, list[float]] = defaultdict(list)
    found: dict[str, list[float]] = defaultdict(list)
    with TemporaryDirectory(prefix="restart-") as folder:
        for turn in range(1 if quick else _TURNS):
            for size in SIZES[:2] if quick else SIZES:
                end, step = _measured(Path(folder) / f"{size}-{turn}", size)
                ended[str(size)].append(end)
                found[str(size)].append(step)
    yield compare(
        "restart-end", "from a killed rank to the end of the command, by the number of ranks", "s", ended, "1"
    )
    goals = [Target(size, "the goal", "at most", 1.0) for size in found]
    found["the goal"] = [_GOAL_S] * len(found["1"])
    title = "from a killed rank to the next new step, started again at once, by the number of ranks"
    yield compare("restart-step", title, "s", found, "the goal", goals)


def _measured(folder: Path, size: int) -> tuple[float, float]:
    words = [f"placement.processes={size}", "placement.device=cpu", f"run.dir={folder}", "run.log_every=1"]
    words += ["recipe.epochs=1000", f"run.save_every.steps={_SAVED}", f"recipe.microbatches={SIZES[-1]}"]
    line = [sys.executable, "-m", "lockstep", "train", "digits", *words]
    job = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until(lambda: last_step(folder) >= _KILLED, [job])
        began = time.monotonic()
        ([*psutil.Process(job.pid).children()] or [psutil.Process(job.pid)])[-1].kill()
        job.wait()
        ended, before = time.monotonic() - began, last_step(folder)
        job = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until(lambda: last_step(folder) > before, [job])
        return ended, time.monotonic() - began
    finally:
        job.send_signal(signal.SIGTERM)
        job.wait()
