"""Who a process is among all processes of a run: what a launcher tells it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankInfo:
    """A process's place. `master` and `port` are None where the rendezvous does not need them."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    launcher: str
    master: str | None = None
    port: int | None = None
