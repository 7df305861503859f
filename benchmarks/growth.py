"""What grows with the number of ranks: digits under ddp, 8 samples a rank and step, each rank started by hand.

On two cores all of it takes longer with more ranks, so what is compared is what a rank does: its CPU time, and what it
exchanges with the store. What rank 0 answers for all, as the host of the store, is beside it.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import psutil
from torch.distributed.elastic.utils.distributed import get_free_port

from benchmarks.report import Result, compare

SIZES: Final = (2, 4, 8, 16, 32, 48)  # each 0.4 GB of its own: 64 have no room in 24
_SAMPLES: Final = 8  # of a rank in a step
_STEPS: Final = 20  # that are looked at
_LONGEST_S: Final = 600.0
_UNITS: Final = {
    "start": ("until the first step", "CPU s of a rank"),
    "step": ("a step", "CPU s of a rank"),
    "store": ("exchanged with the store while training", "bytes/s of a rank"),
    "store-all": ("exchanged with the store while training, by its host", "bytes/s"),
    "connections": ("connections", "of rank 0"),
    "log": ("a rank's own log", "bytes"),
    "events": ("a step in events.jsonl", "bytes"),
    "save": ("a save", "s"),
}


def results(quick: bool) -> Iterator[Result]:
    """Run each number of ranks once."""
    found: dict[str, dict[str, list[float]]] = defaultdict(dict)
    with TemporaryDirectory(prefix="growth-") as folder:
        for size in SIZES[: 2 if quick else None]:
            for what, value in _measured(Path(folder) / str(size), size).items():
                found[what][str(size)] = [value]
    for what, (title, unit) in _UNITS.items():
        yield compare(f"growth-{what}", f"{title}, by the number of ranks", unit, found[what], str(SIZES[0]))


def _measured(folder: Path, size: int) -> dict[str, float]:
    port = get_free_port()  # type: ignore[no-untyped-call]
    words = [f"recipe.batch={_SAMPLES * size}", f"recipe.microbatches={size}", "recipe.epochs=1000", "run.log_every=1"]
    words += [f"placement.{key}={_LONGEST_S:.0f}" for key in ("timeout_s", "stall_timeout_s")]
    line = [sys.executable, "-m", "lockstep", "train", "digits", *words, f"run.dir={folder}", "placement.device=cpu"]
    place = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        psutil.Popen(
            line,
            env=os.environ | {key: str(value) for key, value in {**place, "RANK": rank, "LOCAL_RANK": rank}.items()},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for rank in range(size)
    ]
    try:
        until(lambda: last_step(folder) >= 1, ranks)
        began, first, steps, sent = time.monotonic(), _cpu_s(ranks), last_step(folder), _exchanged(port)
        until(lambda: last_step(folder) >= steps + _STEPS, ranks)
        seconds, spent, steps = time.monotonic() - began, _cpu_s(ranks) - first, last_step(folder) - steps
        exchanged = (_exchanged(port) - sent) / seconds
        connections = sum(each.status == psutil.CONN_ESTABLISHED for each in ranks[0].net_connections("tcp"))
        for rank in ranks:
            rank.send_signal(signal.SIGTERM)
        for rank in ranks:
            rank.wait(_LONGEST_S)
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
    logs = [file.stat().st_size for file in (folder / "logs").iterdir()]
    lines = (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()
    saved = [event for event in map(_event, lines) if event["event"] == "saved"]
    return {
        "start": first / size,
        "step": spent / size / steps,
        "store": exchanged / size,
        "store-all": exchanged,
        "connections": connections,
        "log": max(logs),
        "events": max(len(each) for each in lines if _event(each)["event"] == "step"),
        "save": saved[-1]["seconds"],
    }


def until(reached: Callable[[], bool], processes: Sequence[psutil.Popen | subprocess.Popen[bytes]]) -> None:
    """Wait until a run has come so far; TimeoutError where it does not, RuntimeError where a process of it ended."""
    last = time.monotonic() + _LONGEST_S
    while not reached():
        if codes := [each.returncode for each in processes if each.poll() is not None]:
            raise RuntimeError(f"ended with exit codes {codes}")
        if time.monotonic() > last:
            raise TimeoutError(f"no step within {_LONGEST_S:.0f} s")
        time.sleep(0.1)


def last_step(folder: Path) -> int:
    """Return the last step that a run has logged, 0 for none."""
    file = folder / "events.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    steps: list[int] = [_event(each).get("step", 0) for each in lines]
    return max(steps, default=0)


def _event(line: str) -> dict[str, Any]:
    try:
        event: dict[str, Any] = json.loads(line)
    except ValueError:  # half of one
        return {}
    return event


def _cpu_s(ranks: list[psutil.Popen]) -> float:
    return float(sum(sum(rank.cpu_times()[:2]) for rank in ranks))


def _exchanged(port: int) -> int:
    """Return the bytes that went over the connections of a server of this machine, in both directions."""
    text = subprocess.run(["ss", "-tinH", f"sport = :{port}"], check=True, stdout=subprocess.PIPE, text=True).stdout
    return sum(int(each) for each in re.findall(r"bytes_(?:sent|received):(\d+)", text))
