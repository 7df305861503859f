"""Measures the memory and step time of a rank, by running a few steps with its real engine in a separate process.

If the strategy supports simulated peers (comm/simulated_peers.py), a single process can measure any number of ranks.
Otherwise, all ranks run on this machine.
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

from lockstep.comm.simulated_peers import Traffic, simulate_world
from lockstep.comm.world import World
from lockstep.device.live_bytes import LiveByteCounter
from lockstep.errors import EXIT_DONE
from lockstep.parallel.engine import Engine
from lockstep.ranks.rendezvous import Rendezvous
from lockstep.run.checkpoints import Checkpoints
from lockstep.run.rank import Rank
from lockstep.run.session import open_recipe_rank
from lockstep.setup.build import Setup
from lockstep.setup.engine import start_engine
from lockstep.setup.prepare import PreparedRun, open_recipe_without_placement
from lockstep.setup.resolved import ResolvedConfig
from lockstep.training.digests import StepDigests
from lockstep.training.loop import run_training_step
from lockstep.training.progress import Progress
from lockstep.training.turn import TrainingStep

TIMED_STEPS: Final = 5  # number of timed steps; the step time is their median
# The peak memory is the maximum over steps with these communication times, relative to the step time. In a real run,
# the communication time varies from step to step, and buffers are held until the communication ends.
_COMMUNICATION_TIMES: Final = (0.0, 0.5, 0.5, 0.5, 0.5, 2.0)


@dataclass(frozen=True)
class Measurements:
    """The measurements of a rank.

    `held` is the memory in use between two steps, and `peak` the peak memory of a step, both in bytes. `seconds` is the
    step time without loading data. In each step, the rank sends `sent` bytes in `messages` messages. With simulated
    peers, the step time assumes a link with the given speed, and separate cores for each rank.
    """

    held: int
    peak: int
    seconds: float
    sent: int = 0
    messages: int = 0


def measure_rank(
    resolved: ResolvedConfig, link_bytes_per_s: float, folder: Path, setup: Setup | None, rendezvous: Rendezvous
) -> int:
    """Measure a rank of a placement, and write the measurements to a JSON file in `folder`. Return the exit code.

    With simulated peers, `rendezvous` has a single process, and `link_bytes_per_s` is the simulated speed. If `setup`
    is None, as in a spawned process, the recipe is opened here.
    """
    gc.freeze()  # garbage collections before each measurement then skip existing objects, which saves 0.25 s
    with ExitStack() as stack:
        session = stack.enter_context(open_recipe_rank(rendezvous, resolved.loaded))
        traffic = None
        if rendezvous.info.size == resolved.processes > 1:
            world = stack.enter_context(session.open_world())
        else:
            world, traffic = stack.enter_context(
                simulate_world(0, resolved.processes, session.device, link_bytes_per_s)
            )
        figures = measure(_prepare(resolved, setup), world, traffic)
    (folder / f"{world.rank}.json").write_text(json.dumps(asdict(figures)), encoding="utf-8")
    return EXIT_DONE


def measure(prepared: PreparedRun, world: World, traffic: Traffic | None) -> Measurements:
    """Repeat a step with the first batch of the recipe, and return the measurements of this rank.

    The measured memory includes the model and the optimizer state.
    """
    memory = _MemoryMeter(world.device)
    engine, run_step = _start_engine(prepared, world)
    has_digests = prepared.run.digest_every != "off" and prepared.strategy.traits.exactness == "bits"
    digests = StepDigests(world, engine.gradients, lambda _: None, interval=1) if has_digests else None
    with traffic or nullcontext():
        run_step()  # creates the optimizer state
        held_bytes = memory.measure_current_bytes()
        before = (traffic.num_bytes, traffic.num_messages) if traffic else (0, 0)
        run_step(digests)  # also creates the keys of the digests
        after = (traffic.num_bytes, traffic.num_messages) if traffic else (0, 0)
        sent, messages = after[0] - before[0], after[1] - before[1]
        seconds = statistics.median(_time_step(run_step, world) for _ in range(TIMED_STEPS))
        peak = 0
        for relative_time in _COMMUNICATION_TIMES:
            if traffic and sent * relative_time:
                traffic.mean_delay_factor = max(1.0, relative_time * seconds * traffic.link_bytes_per_s / sent)
            peak = max(peak, memory.measure_peak(lambda: run_step(digests)))
    engine.close()
    return Measurements(held_bytes, peak, seconds, sent, messages)


def measure_save(resolved: ResolvedConfig, folder: Path, setup: Setup | None, rendezvous: Rendezvous) -> int:
    """Measure the seconds that training waits for a save, and write them to a JSON file. Return the exit code.

    This runs a single rank. The JSON file and the checkpoints are written to `folder`.
    """
    save_times = []
    with open_recipe_rank(rendezvous, resolved.loaded) as session, session.open_world() as world:
        engine, run_step = _start_engine(_prepare(resolved, setup), world)
        run_step()  # creates the optimizer state
        checkpoints = Checkpoints(Rank(rendezvous, world, folder, {}, {}), resolved.run, engine, dict)
        for _ in range(TIMED_STEPS):
            start = time.perf_counter()
            checkpoints.save()
            save_times.append(time.perf_counter() - start)
            checkpoints.wait()
        checkpoints.close()
        engine.close()
    (folder / "save.json").write_text(json.dumps(statistics.median(save_times)), encoding="utf-8")
    return EXIT_DONE


def _prepare(resolved: ResolvedConfig, setup: Setup | None) -> PreparedRun:
    """Prepare a run of the recipe. If `setup` is None, as in a spawned process, the recipe is opened here."""
    return PreparedRun(resolved, setup or open_recipe_without_placement(resolved.loaded))


def _start_engine(prepared: PreparedRun, world: World) -> tuple[Engine, Callable[..., None]]:
    """Start the engine of this rank. Return the engine, and a function that runs a step with the first batch."""
    engine, loader = start_engine(prepared, world)
    step, microbatches = next(iter(loader.iterate_steps(0)))

    def run_step(digests: StepDigests | None = None) -> None:
        run_training_step(engine, prepared.recipe, TrainingStep(step, microbatches, Progress(), digests), lr=0.0)

    return engine, run_step


class _MemoryMeter:
    """Measures the memory in use in bytes, from torch's CUDA allocator or, on the CPU, from the C library."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._live = None if device.type == "cuda" else LiveByteCounter()

    def measure_current_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device) if self._live is None else self._live.measure()

    def measure_peak(self, function: Callable[[], None]) -> int:
        if self._live is not None:
            return self._live.measure_peak(function)
        torch.cuda.reset_peak_memory_stats(self._device)
        function()
        return torch.cuda.max_memory_allocated(self._device)


def _time_step(run_step: Callable[[], None], world: World) -> float:
    world.barrier()
    start = time.perf_counter()
    run_step()
    if world.on_gpu:
        torch.cuda.synchronize(world.device)
    return time.perf_counter() - start
