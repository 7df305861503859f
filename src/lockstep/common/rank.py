"""The rank of a process, as set by its launcher, and the address of the rendezvous."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from lockstep.errors import UsageError


@dataclass(frozen=True, slots=True)
class RankInfo:
    """The rank and world size of a process, its local rank and local world size, its launcher, and the rendezvous.

    - `master`, `port`: The rendezvous address, or None if it isn't needed or is unknown.
    - `advice`: How to set the address with this launcher. Shown in errors if the address is unknown.
    - `hosted`: Whether the launcher listens on this address instead of rank 0. Ray listens in the process of rank 0.
    - `restarted_separately`: Whether the launcher can restart the processes of a host while the processes of the other
      hosts are still running. The restarted processes then meet these old processes at the rendezvous.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    launcher: str
    master: str | None = None
    port: int | None = None
    advice: str = ""
    hosted: bool = False
    restarted_separately: bool = False


SECRET: Final = "LOCKSTEP_JOB_SECRET"  # set in the environment of all ranks
RENDEZVOUS_ADDRESSES: Final = "env://, tcp://HOST:PORT or file:///PATH"
RENDEZVOUS_ADDRESS: Final = r"^(env://|tcp://([^/:\[\]]+|\[[^/\[\]]+\]):(\d+)|file:///.+)$"
ALONE: Final = RankInfo(rank=0, size=1, local_rank=0, local_size=1, launcher="none")


def resolve_rendezvous_address(info: RankInfo, address: str) -> str:
    """Return the rendezvous address. Replaces env:// with the address that the launcher or the user set.

    Raises UsageError if `address` doesn't match `RENDEZVOUS_ADDRESS`, or if it is env:// and no address is set.
    """
    match = re.match(RENDEZVOUS_ADDRESS, address)
    if not match or int(match[3] or 1) not in range(1, 65536):
        raise UsageError(f"rendezvous {address}: expected {RENDEZVOUS_ADDRESSES}, with a port from 1 to 65535")
    if address != "env://":
        return address
    if not (info.master and info.port):
        raise UsageError(
            "rendezvous env://: MASTER_ADDR and MASTER_PORT are not both set; set them"
            f"{f' ({info.advice})' if info.advice else ''}, or set placement.rendezvous to tcp://HOST:PORT or "
            f"file:///PATH"
        )
    return f"tcp://[{info.master}]:{info.port}" if ":" in info.master else f"tcp://{info.master}:{info.port}"


def format_ranks_with_hosts(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Format ranks as `rank 2 (b), 3 (b)`. `hosts` has the host name of each rank, or is empty if they are unknown."""
    return "rank " + ", ".join(f"{rank} ({hosts[rank]})" if rank < len(hosts) > 1 else str(rank) for rank in ranks)
