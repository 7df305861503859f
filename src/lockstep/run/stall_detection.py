"""The detector of stalls, as a placement asks for it."""

import time
from functools import partial

import torch

from lockstep.config.placement import Placement
from lockstep.core.devices import resolve_backend
from lockstep.ranks import flight
from lockstep.ranks.failure import Failure
from lockstep.ranks.rendezvous import Rendezvous
from lockstep.ranks.stall import StallDetector


def stall_detector(rendezvous: Rendezvous, placement: Placement, device: torch.device) -> StallDetector:
    """Return a context manager that watches this thread for a stall and reports it, or ends the run, by `placement`."""

    def end(report: str) -> None:
        rendezvous.end(
            Failure(rendezvous.info.rank, rendezvous.info.size, rendezvous.rank_log.host, report, time=time.time())
        )

    tell = end if placement.on_stall == "end" else rendezvous.rank_log.notice
    nccl = resolve_backend(placement.backend, device.type == "cuda") == "nccl"  # in gloo it is this thread that waits
    return StallDetector(rendezvous, placement.stall_timeout_s, tell, partial(_record, rendezvous, nccl), hidden=nccl)


def _record(rendezvous: Rendezvous, nccl: bool) -> str:
    """Write torch's record of this rank's exchanges beside its log; return where, "" where there is none of either."""
    log = rendezvous.rank_log.log
    path = log and log.with_name(f"exchanges-rank-{rendezvous.info.rank}.json")
    return str(path) if path and flight.write(path, nccl) else ""
