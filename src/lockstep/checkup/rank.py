"""The part of the check-up that runs on each rank: checks the host, and then measures the links to the other ranks.

Rank 0 evaluates the results. Local checks that could hang run in a separate thread with a timeout. If a rank doesn't
join a collective, the error names this rank (ranks/rendezvous.py, ranks/stall.py). Therefore, the check-up always ends
and reports missing ranks.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

import torch

from lockstep.checkup import network
from lockstep.checkup.agreement import compare_ranks
from lockstep.checkup.finding import Finding, merge_ranks
from lockstep.checkup.host import HOST_CHECKS, RANK_CHECKS, run_checks
from lockstep.checkup.report import CheckupReport
from lockstep.comm.links import Link, measure_links, schedule_rounds
from lockstep.comm.world import World, choose_device, open_world
from lockstep.common import plainfile
from lockstep.device import host, interfaces
from lockstep.errors import LockstepError
from lockstep.ranks.failure import Failure
from lockstep.ranks.member import run_with_timeout
from lockstep.ranks.rendezvous import Rendezvous
from lockstep.ranks.stall import StallDetector
from lockstep.ranks.status import RankStatus

LOST_AFTER_S: Final = 10.0
_STALL_S: Final = 8.0  # maximum duration of a measurement; the slowest one takes 2 s over a 1 Mbit/s link
# Timeout of collectives; the stall detector needs less time to identify a rank that hangs.
_COLLECTIVE_TIMEOUT_S: Final = 20.0
_HOST_TIMEOUT_S: Final = 15.0  # the first query of a GPU takes seconds
_NETWORK_TIMEOUT_S: Final = 8.0


@dataclass(frozen=True)
class CheckupRequest:
    """The settings of a check-up."""

    device: Literal["auto", "cpu", "cuda"]


def run_checkup(request: CheckupRequest, rendezvous: Rendezvous) -> CheckupReport | None:
    """Run the check-up. Return the report on rank 0, and None on all other ranks. All ranks must call this function."""
    start = time.monotonic()
    steps = [0]
    rendezvous.get_status = lambda: RankStatus("checking", steps[0])

    def count_step() -> None:
        steps[0] += 1

    with _make_stall_detector(rendezvous):
        rank_infos = rendezvous.gather(_collect_rank_info())
        count_step()
    measurements, world = _connect(request, rendezvous, rank_infos)
    with _make_stall_detector(rendezvous):
        if world is not None:
            measurements["links"] = [
                asdict(link) for link in measure_links(world, schedule_rounds(rendezvous.hosts), count_step)
            ]
            world.close()
        all_measurements = rendezvous.gather(measurements)
    if rendezvous.info.rank > 0:
        return None
    findings, found_links = _collect_findings(rendezvous, rank_infos, all_measurements)
    seconds = time.monotonic() - start
    return CheckupReport(rendezvous.hosts, seconds, tuple(findings), found_links, tuple(rank_infos))


def _make_stall_detector(rendezvous: Rendezvous) -> StallDetector:
    """Return a stall detector that ends all ranks if a rank hangs, and reports the stack of that rank."""

    def end(report: str) -> None:
        info = rendezvous.info
        rendezvous.end(Failure(info.rank, info.size, rendezvous.rank_log.host, report, time=time.time()))

    return StallDetector(rendezvous, _STALL_S, end)


def _collect_rank_info() -> dict[str, Any]:
    """Collect information about the host of this rank: versions, devices, interfaces and environment variables."""
    rank_info: dict[str, Any] = {"timed_out": {}}

    def query(name: str, timeout_s: float, collect: Callable[[], dict[str, Any]]) -> None:
        answer = run_with_timeout(timeout_s, collect)
        if answer is None:
            rank_info["timed_out"][name] = timeout_s
        else:
            rank_info.update(answer)

    query("host", _HOST_TIMEOUT_S, host.get_host_info)
    query("network", _NETWORK_TIMEOUT_S, lambda: {"network": interfaces.get_network_info()})
    return rank_info


def _connect(
    request: CheckupRequest, rendezvous: Rendezvous, rank_infos: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, Any], World | None]:
    """Initialize the process group. Return the errors so far, and the world, or None if a rank couldn't connect.

    On rank 0, `rank_infos` contains the information about all ranks. If it shows that a host is unreachable, no rank
    tries to connect.
    """
    # Errors from choosing the device and from connecting, followed by the measured links.
    measurements: dict[str, Any] = {"device": "", "failed": "", "links": []}
    try:
        device = choose_device(request.device, rendezvous.info)
    except LockstepError as error:
        device, measurements["device"] = torch.device("cpu"), str(error)
    if rendezvous.store is None:
        return measurements, None
    unreachable = network.find_unreachable_ranks(rank_infos, rendezvous.hosts)
    replies = _all_gather(rendezvous, {"cuda": device.type == "cuda", "unreachable": unreachable})
    if replies[0]["unreachable"]:
        measurements["failed"] = "not tried"
        return measurements, None
    device = device if all(reply["cuda"] for reply in replies) else torch.device("cpu")
    world = None
    try:
        # `open_world` initializes the process group. Connecting and collectives time out earlier than in a run.
        world = open_world(rendezvous, device, timeout_s=_COLLECTIVE_TIMEOUT_S)
        world.barrier()
    except (LockstepError, RuntimeError) as error:
        measurements["failed"] = (str(error).splitlines() or [type(error).__name__])[0]
    if any(reply["failed"] for reply in _all_gather(rendezvous, {"failed": measurements["failed"]})):
        return measurements, None
    return measurements, world


def _all_gather(rendezvous: Rendezvous, value: dict[str, Any]) -> list[dict[str, Any]]:
    """All-gather a JSON-compatible value. Return the values of all ranks in rank order."""
    return list(plainfile.parse_json(rendezvous.broadcast_text(json.dumps(rendezvous.gather(value)))))


def _collect_findings(
    rendezvous: Rendezvous, rank_infos: list[dict[str, Any]], measurements: list[dict[str, Any]]
) -> tuple[list[Finding], tuple[Link, ...]]:
    hosts = rendezvous.hosts
    for rank, measurement in enumerate(measurements):
        if measurement["device"] and "cards" in rank_infos[rank]:
            rank_infos[rank]["cards"]["problem"] = measurement["device"]
    multi_host = len(set(hosts)) > 1
    findings = merge_ranks({rank: run_checks(RANK_CHECKS, rank_infos[rank], multi_host) for rank in range(len(hosts))})
    findings += merge_ranks(
        {rank: run_checks(HOST_CHECKS, rank_infos[rank], multi_host) for rank in map(hosts.index, dict.fromkeys(hosts))}
    )
    found_links = tuple(Link(**link) for measurement in measurements for link in measurement["links"])
    findings += compare_ranks(rank_infos, hosts)
    findings += network.make_connection_findings(
        [measurement["failed"] for measurement in measurements], rank_infos, hosts
    )
    findings += network.make_interface_findings(rank_infos, hosts)
    findings += network.make_link_findings(found_links, hosts)
    return findings, found_links
