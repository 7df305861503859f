"""Who a process is among all processes of a run: what a launcher tells it."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.errors import UsageError


@dataclass(frozen=True, slots=True)
class RankInfo:
    """A process's place. `master` and `port` are None where the rendezvous does not need them, or nobody knows.

    `advice` says then how to tell them to processes of this launcher.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    launcher: str
    master: str | None = None
    port: int | None = None
    advice: str = ""


def meeting(info: RankInfo, rendezvous: str) -> str:
    """Return where the ranks meet: env:// becomes the address that the launcher told, or the user beside it.

    Of torchrun it stays what it is: there the agent listens, and torch knows how to ask it.
    """
    if rendezvous != "env://":
        return rendezvous
    if not (info.master and info.port):
        raise UsageError(
            "rendezvous env://: MASTER_ADDR and MASTER_PORT are not both set; set them"
            f"{f' ({info.advice})' if info.advice else ''}, or placement.rendezvous to tcp://HOST:PORT or file:///PATH"
        )
    if info.launcher == "torchrun":
        return rendezvous
    return f"tcp://[{info.master}]:{info.port}" if ":" in info.master else f"tcp://{info.master}:{info.port}"
