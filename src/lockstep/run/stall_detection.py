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

    info = rendezvous.info

    def end(report: str) -> None:
        # The failure is that of the rank that the others wait for, not of the one that reports it.
        rank = next(iter(detector.late), info.rank)
        text = report.replace("for other ranks", f"for rank {rank}", 1) if detector.late else report
        host = rendezvous.hosts[rank] if rank < len(rendezvous.hosts) else rendezvous.rank_log.host
        rendezvous.end(Failure(rank, info.size, host, text, time=time.time()))

    tell = end if placement.on_stall == "end" else rendezvous.rank_log.notice
    nccl = resolve_backend(placement.backend, device.type == "cuda") == "nccl"  # in gloo it is this thread that waits
    detector = StallDetector(
        rendezvous, placement.stall_timeout_s, tell, partial(_record, rendezvous, nccl), hidden=nccl
    )
    return detector


def _record(rendezvous: Rendezvous, nccl: bool) -> str:
    """Write torch's record of this rank's exchanges beside its log; return where, "" where there is none of either."""
    log = rendezvous.rank_log.log
    path = log and log.with_name(f"exchanges-rank-{rendezvous.info.rank}.json")
    return str(path) if path and flight.write(path, nccl) else ""
