"""Who a process is among all processes of a run: what its launcher passes on."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from lockstep.errors import UsageError


@dataclass(frozen=True, slots=True)
class RankInfo:
    """A process's place. `master` and `port` are None where the rendezvous does not need them, or nobody knows.

    `advice` says then how to pass them to processes of this launcher. `hosted`: the launcher itself listens there, and
    not rank 0; Ray does so in the process of rank 0. `restarted_alone`: the processes of its host may be started again
    before the others have ended, and then find these where they are to meet.
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
    restarted_alone: bool = False


SECRET: Final = "LOCKSTEP_JOB_SECRET"  # in the environment of all ranks
RENDEZVOUS_ADDRESSES: Final = "env://, tcp://HOST:PORT or file:///PATH"
RENDEZVOUS_ADDRESS: Final = r"^(env://|tcp://([^/:\[\]]+|\[[^/\[\]]+\]):(\d+)|file:///.+)$"
ALONE: Final = RankInfo(rank=0, size=1, local_rank=0, local_size=1, launcher="none")


def rendezvous_address(info: RankInfo, address: str) -> str:
    """Return the rendezvous: env:// becomes the address set by the launcher, or by the user.

    UsageError where `address` is none of `RENDEZVOUS_ADDRESSES`, or env:// where the launcher set none.
    """
    match = re.match(RENDEZVOUS_ADDRESS, address)
    if not match or int(match[3] or 1) not in range(1, 65536):
        raise UsageError(f"rendezvous {address}: expected {RENDEZVOUS_ADDRESSES}; ports go from 1 to 65535")
    if address != "env://":
        return address
    if not (info.master and info.port):
        raise UsageError(
            "rendezvous env://: MASTER_ADDR and MASTER_PORT are not both set; set them"
            f"{f' ({info.advice})' if info.advice else ''}, or placement.rendezvous to tcp://HOST:PORT or file:///PATH"
        )
    return f"tcp://[{info.master}]:{info.port}" if ":" in info.master else f"tcp://{info.master}:{info.port}"


def ranks_in_words(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Return `rank 2 (b), 3 (b)`; the hosts, by rank, where they are known."""
    return "rank " + ", ".join(f"{rank} ({hosts[rank]})" if rank < len(hosts) > 1 else str(rank) for rank in ranks)
