"""Opens a rank: its device, its stall detection, the comparison with the other ranks, and its process group.

All work on ranks starts here, so that the same checks apply to training, evaluation, replay, verification, comparison,
planning and custom training loops.
"""

import platform
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, final

import torch

from lockstep.comm.world import World, choose_device, open_world
from lockstep.common.rank import RankInfo
from lockstep.common.version import __version__
from lockstep.config.base import values
from lockstep.config.load import Loaded, comparable
from lockstep.config.placement import Placement
from lockstep.core.devices import resolve_backend
from lockstep.core.engine_recipe import EngineRecipe
from lockstep.device import machine
from lockstep.device.env_flags import check_switches
from lockstep.device.memory import keep_freed_memory
from lockstep.device.precision import fix_kernels
from lockstep.ranks import flight
from lockstep.ranks.failure import Failure
from lockstep.ranks.rendezvous import Rendezvous
from lockstep.ranks.stall import StallDetector


@final
class Session:
    """An open rank. Its device is ready, stall detection is active, and its settings match those of all other ranks."""

    def __init__(self, rendezvous: Rendezvous, placement: Placement, device: torch.device) -> None:
        self.device = device
        self._rendezvous = rendezvous
        self._placement = placement

    @contextmanager
    def open_world(self) -> Iterator[World]:
        """Open the process group, and close it at the end of the block. All ranks must call it exactly once.

        After an error, the process group stays open, because other ranks may be in a collective.
        """
        world = open_world(self._rendezvous, self.device, self._placement.backend, self._placement.timeout_s)
        yield world
        world.close()


@contextmanager
def open_rank(
    rendezvous: Rendezvous, placement: Placement, recipe: EngineRecipe, facts: Mapping[str, Any]
) -> Iterator[Session]:
    """Open this rank. All ranks must call it after they have joined.

    This sets the kernels, the number of threads and the memory allocator for the whole process. If a rank stalls, the
    stall is reported or ends the run, depending on `placement.on_stall`.

    `facts` must be JSON-compatible. If `facts`, the placement or the installed versions differ between ranks, raises
    RanksDifferError on all ranks. If an environment variable would change the results on a GPU, raises UsageError.
    """
    device = prepare_device(placement, rendezvous.info, recipe)
    with _stall_detector(rendezvous, placement, device):
        rendezvous.compare({**facts, **_placement_facts(placement, device, compiled=recipe.compile)})
        yield Session(rendezvous, placement, device)


@contextmanager
def open_recipe_rank(
    rendezvous: Rendezvous, loaded: Loaded, facts: Mapping[str, Any] | None = None
) -> Iterator[Session]:
    """Open this rank for a recipe, which must be the same on all ranks. See `open_rank`."""
    recipe = loaded.config.recipe
    compared_facts = {"recipe": comparable(values(recipe)), **(facts or {})}
    with open_rank(rendezvous, loaded.config.placement, recipe, compared_facts) as session:
        yield session


def prepare_device(placement: Placement, info: RankInfo, recipe: EngineRecipe) -> torch.device:
    """Return the device of a rank. This sets the kernels, threads and memory allocator for the whole process."""
    device = choose_device(placement.device, info, placement.backend)
    fix_kernels(recipe.threads, recipe.precision, device)
    keep_freed_memory()
    if device.type == "cuda":
        check_switches(recipe.precision)
    return device


def _placement_facts(placement: Placement, device: torch.device, *, compiled: bool) -> dict[str, Any]:
    """Return the placement settings and installed versions that must be the same on all ranks."""
    return {
        "placement.strategy": values(placement)["strategy"],
        "placement.affinity": placement.affinity,  # with auto, all ranks exchange their hosts and cores
        "placement.backend": placement.backend,
        "placement.audit_every": placement.audit_every,
        "placement.on_corruption": placement.on_corruption,
        "versions": {"lockstep": __version__, "its source": machine.source(), "python": platform.python_version()},
        "versions of the libraries, CPU or threads": machine.numerics(device, compiled=compiled),
    }


def _stall_detector(rendezvous: Rendezvous, placement: Placement, device: torch.device) -> StallDetector:
    """Return a context manager that detects stalls of this thread. A stall is reported or ends the run."""
    info = rendezvous.info

    def end(report: str) -> None:
        # The failure belongs to the late rank, not to the rank that reports it.
        rank = next(iter(detector.late), info.rank)
        text = report.replace("for other ranks", f"for rank {rank}", 1) if detector.late else report
        host = rendezvous.hosts[rank] if rank < len(rendezvous.hosts) else rendezvous.rank_log.host
        rendezvous.end(Failure(rank, info.size, host, text, time=time.time()))

    tell = end if placement.on_stall == "end" else rendezvous.rank_log.notice
    # With gloo, this thread waits for the other ranks.
    nccl = resolve_backend(placement.backend, device.type == "cuda") == "nccl"
    record = partial(_dump_flight_recorder, rendezvous, nccl)
    detector = StallDetector(rendezvous, placement.stall_timeout_s, tell, record, hidden=nccl)
    return detector


def _dump_flight_recorder(rendezvous: Rendezvous, nccl: bool) -> str:
    """Write this rank's Flight Recorder dump next to its log.

    Returns the path of the dump, or an empty string if this rank has no log or torch has no record of its collectives.
    """
    log = rendezvous.rank_log.log
    path = log and log.with_name(f"exchanges-rank-{rendezvous.info.rank}.json")
    return str(path) if path and flight.write(path, nccl) else ""
