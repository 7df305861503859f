"""Opens a rank: prepares the device, starts stall detection, compares settings across ranks, and opens process groups.

Training, evaluation, replay, verification, comparison, planning and custom training loops all start here, so that the
same checks apply to all of them.
"""

import platform
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, final

import torch

from lockstep.comm.world import World, choose_device, open_world
from lockstep.common.collection import restore_garbage_collection
from lockstep.common.rank import RankInfo
from lockstep.common.version import __version__
from lockstep.config.base import section_to_dict
from lockstep.config.load import LoadedConfig, select_comparable_values
from lockstep.config.placement import Placement
from lockstep.core.devices import resolve_backend
from lockstep.core.engine_recipe import EngineRecipe
from lockstep.device import machine
from lockstep.device.env_flags import check_env_flags
from lockstep.device.memory import keep_freed_memory
from lockstep.device.precision import select_deterministic_kernels
from lockstep.ranks import flight
from lockstep.ranks.failure import Failure
from lockstep.ranks.rendezvous import Rendezvous
from lockstep.ranks.stall import StallDetector


@final
class Session:
    """An open rank: its device is ready, stall detection is active, and its settings match those of the other ranks."""

    def __init__(self, rendezvous: Rendezvous, placement: Placement, device: torch.device) -> None:
        self.device = device
        self._rendezvous = rendezvous
        self._placement = placement

    @contextmanager
    def open_world(self) -> Iterator[World]:
        """Return a context manager that opens the process group and yields it as a `World`. All ranks enter it once.

        If the `with` block raises an error, the process group stays open, because other ranks may be in a collective.
        """
        world = open_world(self._rendezvous, self.device, self._placement.backend, self._placement.timeout_s)
        yield world
        world.close()


@contextmanager
def open_rank(
    rendezvous: Rendezvous, placement: Placement, recipe: EngineRecipe, compared_values: Mapping[str, Any]
) -> Iterator[Session]:
    """Return a context manager that opens this rank. All ranks must enter it after they have joined.

    Sets the kernels, the number of threads and the memory allocator for the whole process. If a rank stalls, the stall
    is reported or ends the run, depending on `placement.on_stall`.

    `compared_values` are additional JSON-compatible values to compare. If these values, the placement or the installed
    versions differ between ranks, raises RanksDifferError on all ranks. If an environment variable would change the
    results on a GPU, raises UsageError.
    """
    device = prepare_device(placement, rendezvous.info, recipe)
    with _make_stall_detector(rendezvous, placement, device):
        rendezvous.compare(
            {**compared_values, **_collect_settings_and_versions(placement, device, compiled=recipe.compile)}
        )
        yield Session(rendezvous, placement, device)


@contextmanager
def open_recipe_rank(
    rendezvous: Rendezvous, loaded: LoadedConfig, compared_values: Mapping[str, Any] | None = None
) -> Iterator[Session]:
    """Return a context manager that opens this rank, and also compares the recipe between ranks. See `open_rank`."""
    recipe = loaded.config.recipe
    all_compared_values = {"recipe": select_comparable_values(section_to_dict(recipe)), **(compared_values or {})}
    with open_rank(rendezvous, loaded.config.placement, recipe, all_compared_values) as session:
        yield session


def prepare_device(placement: Placement, info: RankInfo, recipe: EngineRecipe) -> torch.device:
    """Return the device of a rank.

    Also sets the kernels, the threads, the memory allocator and the garbage collection for the whole process.
    """
    restore_garbage_collection()
    device = choose_device(placement.device, info, placement.backend)
    select_deterministic_kernels(recipe.threads, recipe.precision, device)
    keep_freed_memory()
    if device.type == "cuda":
        check_env_flags(recipe.precision)
    return device


def _collect_settings_and_versions(placement: Placement, device: torch.device, *, compiled: bool) -> dict[str, Any]:
    """Return the placement settings and installed versions that must be the same on all ranks."""
    return {
        "placement.strategy": section_to_dict(placement)["strategy"],
        "placement.affinity": placement.affinity,  # with auto, all ranks exchange their hosts and cores
        "placement.backend": placement.backend,
        "placement.audit_every": placement.audit_every,
        "placement.on_corruption": placement.on_corruption,
        "versions": {"lockstep": __version__, "its source": machine.hash_source(), "python": platform.python_version()},
        "versions of the libraries, CPU or threads": machine.make_fingerprint(device, compiled=compiled),
    }


def _make_stall_detector(rendezvous: Rendezvous, placement: Placement, device: torch.device) -> StallDetector:
    """Return a context manager that detects stalls of the current thread, and reports them or ends the run."""
    info = rendezvous.info

    def end_run(report: str) -> None:
        # Report the late rank as failed, and not the rank that detected the stall.
        rank = next(iter(detector.late_ranks), info.rank)
        text = report.replace("for other ranks", f"for rank {rank}", 1) if detector.late_ranks else report
        host = rendezvous.hosts[rank] if rank < len(rendezvous.hosts) else rendezvous.rank_log.host
        rendezvous.end(Failure(rank, info.size, host, text, time=time.time()))

    report_stall = end_run if placement.on_stall == "end" else rendezvous.rank_log.write
    # With NCCL, the device waits for the other ranks, but this thread doesn't.
    nccl = resolve_backend(placement.backend, device.type == "cuda") == "nccl"
    dump_collectives = partial(_dump_flight_recorder, rendezvous, nccl)
    detector = StallDetector(
        rendezvous, placement.stall_timeout_s, report_stall, dump_collectives, waits_on_device=nccl
    )
    return detector


def _dump_flight_recorder(rendezvous: Rendezvous, nccl: bool) -> str:
    """Write this rank's Flight Recorder dump next to its log, and return the path of the dump.

    Returns an empty string if this rank has no log, or if torch hasn't recorded its collectives.
    """
    log = rendezvous.rank_log.log_path
    path = log and log.with_name(f"exchanges-rank-{rendezvous.info.rank}.json")
    return str(path) if path and flight.write_dump(path, nccl) else ""
