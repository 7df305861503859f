"""Measures the memory and time of a rank: its real engine takes a few steps of the recipe, in a separate process.

If the strategy works with simulated peers (comm/simulated_peers.py), one process is enough for any number of ranks.
Otherwise all ranks run on this machine.
"""

import gc
import json
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import torch

from lockstep.comm.simulated_peers import Traffic, pretended_world
from lockstep.comm.world import World
from lockstep.device.live_bytes import LiveBytes
from lockstep.errors import EXIT_DONE
from lockstep.parallel.engine import Engine
from lockstep.ranks.rendezvous import Rendezvous
from lockstep.run.checkpoints import Checkpoints
from lockstep.run.rank import Rank
from lockstep.run.session import open_recipe_rank
from lockstep.setup.build import Setup
from lockstep.setup.engine import start_engine
from lockstep.setup.prepare import Prepared, open_unplaced
from lockstep.setup.resolved import Resolved
from lockstep.training.digests import StepDigests
from lockstep.training.loop import take_step
from lockstep.training.progress import Progress
from lockstep.training.turn import Turn

TIMED: Final = 5  # steps, of whose times the median is taken
# Steps whose memory is looked at, of which the most counts: where peers are pretended, how long the exchanges of each
# take, in steps. In a run they end at another time in each step, and what waits for them is held.
_LATE: Final = (0.0, 0.5, 0.5, 0.5, 0.5, 2.0)


@dataclass(frozen=True)
class Figures:
    """Of a rank: the bytes that are `held` between two steps, and at most in one.

    `seconds` is the time of a step, input not included. Where peers are pretended it is that of a link of the given
    speed and of cores of its own, and `sent` bytes in so many `messages` are what a step sends.
    """

    held: int
    peak: int
    seconds: float
    sent: int = 0
    messages: int = 0


def work(resolved: Resolved, link: float, folder: Path, ready: Setup | None, rendezvous: Rendezvous) -> int:
    """Be a rank, and write its figures to the folder; `rendezvous` is of one process where peers are pretended.

    One that was spawned has the recipe to make real.
    """
    gc.freeze()  # collections, before each look at memory, leave out what is there by now: 0.25 s each
    with ExitStack() as held:
        session = held.enter_context(open_recipe_rank(rendezvous, resolved.loaded))
        traffic = None
        if rendezvous.info.size == resolved.processes > 1:
            world = held.enter_context(session.open_world())
        else:
            world, traffic = held.enter_context(pretended_world(0, resolved.processes, session.device, link))
        found = measure(_prepared(resolved, ready), world, traffic)
    (folder / f"{world.rank}.json").write_text(json.dumps(asdict(found)), encoding="utf-8")
    return EXIT_DONE


def measure(prepared: Prepared, world: World, traffic: Traffic | None) -> Figures:
    """Let this rank do steps with the recipe's first batch: its memory is counted from before the model is built on."""
    memory = _Memory(world.device)
    engine, do = _started(prepared, world)
    digested = prepared.run.digest_every != "off" and prepared.strategy.traits.exactness == "bits"
    digests = StepDigests(world, engine.gradients, lambda _: None, every=1) if digested else None
    with traffic or nullcontext():
        do()  # which makes the optimizer's state
        held = memory.now()
        before = (traffic.bytes, traffic.messages) if traffic else (0, 0)
        do(digests)  # which makes their keys
        after = (traffic.bytes, traffic.messages) if traffic else (0, 0)
        sent, messages = after[0] - before[0], after[1] - before[1]
        seconds = statistics.median(_seconds(do, world) for _ in range(TIMED))
        peak = 0
        for steps in _LATE:
            if traffic and sent * steps:
                traffic.late = max(1.0, steps * seconds * traffic.link / sent)
            peak = max(peak, memory.peak(lambda: do(digests)))
    engine.close()
    return Figures(held, peak, seconds, sent, messages)


def work_saving(resolved: Resolved, folder: Path, ready: Setup | None, rendezvous: Rendezvous) -> int:
    """As `work`, be the one rank, and write how many seconds training waits for a save to the folder."""
    found = []
    with open_recipe_rank(rendezvous, resolved.loaded) as session, session.open_world() as world:
        engine, do = _started(_prepared(resolved, ready), world)
        do()  # which makes the optimizer's state
        checkpoints = Checkpoints(Rank(rendezvous, world, folder, {}, {}), resolved.run, engine, dict)
        for _ in range(TIMED):
            began = time.perf_counter()
            checkpoints.save()
            found.append(time.perf_counter() - began)
            checkpoints.wait()
        checkpoints.close()
        engine.close()
    (folder / "save.json").write_text(json.dumps(statistics.median(found)), encoding="utf-8")
    return EXIT_DONE


def _prepared(resolved: Resolved, ready: Setup | None) -> Prepared:
    """Return what is to be started; a spawned process, without `ready`, opens the recipe itself."""
    return Prepared(resolved, ready or open_unplaced(resolved.loaded))


def _started(prepared: Prepared, world: World) -> tuple[Engine, Callable[..., None]]:
    """Start the engine of this rank; return it, and what lets it do a step with the recipe's first batch."""
    engine, loader = start_engine(prepared, world)
    step, microbatches = next(iter(loader.training(0)))

    def do(digests: StepDigests | None = None) -> None:
        take_step(engine, prepared.recipe, Turn(step, microbatches, Progress(), digests), lr=0.0)

    return engine, do


class _Memory:
    """The bytes of a device that are in use beside what was before: by torch's allocator, or the C library."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._live = None if device.type == "cuda" else LiveBytes()

    def now(self) -> int:
        return torch.cuda.memory_allocated(self._device) if self._live is None else self._live.now()

    def peak(self, do: Callable[[], None]) -> int:
        if self._live is not None:
            return self._live.peak(do)
        torch.cuda.reset_peak_memory_stats(self._device)
        do()
        return torch.cuda.max_memory_allocated(self._device)


def _seconds(do: Callable[[], None], world: World) -> float:
    world.barrier()
    began = time.perf_counter()
    do()
    if world.on_gpu:
        torch.cuda.synchronize(world.device)
    return time.perf_counter() - began
