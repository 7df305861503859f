"""How long training stands still for a checkpoint: with `run.save_async`, and without, beside the time of a step.

ResNet-18 at 32x32 by AdamW on 2 processes, 64 samples each; a checkpoint has the weights and two states for each. What
is timed is the call that the loop makes, from a moment when nothing is being written. Files go to the folder for
temporary files.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.learners import LR, Work, start
from benchmarks.processes import Contestant, Turn, take_turns
from benchmarks.report import Result, Target, compare
from lockstep.comm.world import World
from lockstep.device.memory import keep_freed_memory
from lockstep.training.checkpoint.saver import Saver
from lockstep.training.checkpoint.store import Snapshot
from lockstep.training.progress import Progress

STEP, BESIDE, BEFORE = "a step", "a save with save_async", "a save without"
SIZE: Final = 2
WORK: Final = Work("ResNet-18", "AdamW", samples=64, microbatches=SIZE)


def results(quick: bool) -> list[Result]:
    """Measure a strategy whose tensors are whole and one whose tensors are cut."""
    return [_compared(name, turns=2 if quick else 15) for name in ("ddp", "zero3")]


def _compared(name: str, turns: int) -> Result:
    contestants = {each: Contestant(partial(_timed, each, name), SIZE) for each in (STEP, BESIDE, BEFORE)}
    return compare(
        f"saving-{name}",
        f"saving: {name}, ResNet-18 at 32x32, AdamW, {SIZE} processes",
        "s that training waits",
        take_turns(contestants, turns),
        STEP,
        [Target(BESIDE, STEP, "at most", 1.0)],
    )


def _timed(kind: str, name: str, world: World) -> Turn:
    keep_freed_memory()
    engine, own, step = start(name, WORK, world)
    folder = Path(world.broadcast_text(tempfile.mkdtemp(prefix="lockstep-saving-") if world.rank == 0 else ""))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    saver = Saver(world, folder, keep=1, background=kind == BESIDE)
    progress = Progress()

    def train() -> None:
        engine.forward_backward(own, step)
        engine.update(LR, None)
        progress.step += 1

    def save() -> None:
        state = engine.state()
        saver.save(progress, Snapshot(state.model, state.optimizer, state.ema, {"engine": state.scalars}))

    what: Callable[[], None] = train if kind == STEP else save

    def turn() -> float:
        train()
        world.barrier()
        began = time.perf_counter()
        what()
        seconds = time.perf_counter() - began
        saver.wait()
        return seconds

    return turn
