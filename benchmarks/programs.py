"""Whole programs, from their start to their end: what they print, and the time that they take."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Ended:
    """A program that ended well: what it printed, its time by the clock, and that of its processes on all cores."""

    printed: str
    seconds: float
    cpu_s: float


@dataclass(frozen=True)
class Trained:
    """A run of ours: its last evaluation and all of them, the hash of its weights, and its times."""

    figures: Mapping[str, Any]
    evaluations: Sequence[Mapping[str, Any]]
    sha256: str
    seconds: float
    cpu_s: float


def run(command: Sequence[str], folder: Path, threads: int = 1) -> Ended:
    """Run Python with these arguments in `folder`; RuntimeError with the end of what it printed where it fails."""
    before, began = _cpu_s(), time.perf_counter()
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    seconds = time.perf_counter() - began
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout[-3000:]}")
    return Ended(done.stdout, seconds, _cpu_s() - before)


def train(recipe: str, processes: int, folder: Path, *overrides: str) -> Trained:
    """Train a recipe as `lockstep train` does, in the run folder `folder`."""
    placed = (f"placement.processes={processes}", "placement.device=cpu", f"run.dir={folder}")
    ended = run(["-m", "lockstep", "train", recipe, *placed, *overrides], folder.parent)
    lines = (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()
    events = [json.loads(line) for line in lines]
    evaluations = [event for event in events if event["event"] == "evaluated"]
    sha256 = ended.printed.rpartition("weights sha256 ")[2].split()[0]
    return Trained(evaluations[-1], evaluations, sha256, ended.seconds, ended.cpu_s)


def _cpu_s() -> float:
    """Return the time that all processes had which this one started and which have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
