"""Measures latency and bandwidth between ranks.

With few ranks, each pair is measured separately. With many ranks, one rank of each host is paired with one rank of each
other host as in a tournament, so that a host has one partner at a time. Within a host, each rank is paired with the
next rank.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.peer_errors import translate_peer_errors
from lockstep.comm.world import World

ALONE: Final = 66  # pairs, which is 12 ranks
MOST_ROUNDS: Final = 100
_PINGS: Final = 20
_FIRST_BYTES: Final = 16 << 10
_LAST_BYTES: Final = 16 << 20
_LONG_S: Final = 0.03  # seconds; a longer transfer is large enough to measure
_REPEATS: Final = 3

Pair = tuple[int, int]


@dataclass(frozen=True)
class Link:
    """A link between two ranks: `latency_s` for a few bytes, and `mb_s` in 10^6 bytes per second for large messages."""

    source: int
    target: int
    latency_s: float
    mb_s: float


def rounds(hosts: Sequence[str]) -> list[list[Pair]]:
    """Return the pairs of ranks that measure at the same time, by round. `hosts` are those of all ranks."""
    size = len(hosts)
    if size * (size - 1) // 2 <= ALONE:
        return [[(one, other)] for one in range(size) for other in range(one + 1, size)]
    here = {host: [rank for rank in range(size) if hosts[rank] == host] for host in dict.fromkeys(hosts)}
    leads = [ranks[0] for ranks in here.values()]
    between = [[(leads[one], leads[other]) for one, other in each] for each in tournament(len(leads))]
    within = [
        [(one, other) for ranks in here.values() for one, other in list(pairwise(ranks))[odd::2]] for odd in (0, 1)
    ]
    return [*(each for each in within if each), *between[:MOST_ROUNDS]]


def tournament(count: int) -> list[list[Pair]]:
    """Return rounds in which each of `count` players meets each other player once, and one at a time."""
    players = [*range(count), *([-1] if count % 2 else [])]  # the player paired with -1 rests
    found = []
    for _ in range(len(players) - 1):
        half = len(players) // 2
        pairs = zip(players[:half], reversed(players[half:]), strict=True)
        found.append([(min(pair), max(pair)) for pair in pairs if -1 not in pair])
        players = [players[0], players[-1], *players[1:-1]]
    return found


def links(world: World, planned: Sequence[Sequence[Pair]], step: Callable[[], None] = lambda: None) -> list[Link]:
    """Measure the pairs of each round in both directions, and return the links from this rank. All ranks call it."""
    device = world.device if world.backend == "nccl" else torch.device("cpu")
    buffer = torch.ones(_LAST_BYTES, dtype=torch.uint8, device=device)
    found = []
    for pairs in planned:
        step()
        world.barrier()
        for one, other in pairs:
            with translate_peer_errors():
                if world.rank == one:
                    found.append(_from_here(world, other, buffer))
                    _to_here(other, buffer)
                elif world.rank == other:
                    _to_here(one, buffer)
                    found.append(_from_here(world, one, buffer))
    return found


def _from_here(world: World, target: int, buffer: Tensor) -> Link:
    few = torch.zeros(1, dtype=torch.int64, device=buffer.device)

    def once(count: int) -> float:
        """Send `count`, and that many bytes. Return the time until the target has received them."""
        began = time.perf_counter()
        dist.send(few.fill_(count), target)
        if count > 0:
            dist.send(buffer[:count], target)
        dist.recv(few, target)
        if few.device.type == "cuda":  # calls of NCCL return immediately, calls of gloo block
            torch.cuda.current_stream(few.device).synchronize()
        return time.perf_counter() - began

    once(-1)  # connects
    latency_s = min(once(-1) for _ in range(_PINGS)) / 2
    size, took = _FIRST_BYTES, 0.0
    while True:
        took = min(once(size) for _ in range(_REPEATS))  # a repeat may have waited for a core
        if took > _LONG_S or size == _LAST_BYTES:
            break
        size *= 4
    dist.send(few.fill_(0), target)
    return Link(world.rank, target, latency_s, size / max(took - latency_s, 1e-9) / 1e6)


def _to_here(source: int, buffer: Tensor) -> None:
    few = torch.zeros(1, dtype=torch.int64, device=buffer.device)
    while True:
        dist.recv(few, source)
        count = int(few)
        if count == 0:
            return
        if count > 0:
            dist.recv(buffer[:count], source)
        dist.send(few, source)
