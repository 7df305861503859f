"""Measures latency and bandwidth between ranks.

With few ranks, each pair is measured separately. With many ranks, hosts are paired as in a round-robin tournament, so
that each host is in one pair at a time. One rank on each host measures the link. Within a host, each rank is paired
with the next rank.
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

_MAX_SEPARATE_PAIRS: Final = 66  # the pairs among 12 ranks; measure more pairs several at a time
MAX_ROUNDS: Final = 100
_PINGS: Final = 20
_FIRST_BYTES: Final = 16 << 10
_LAST_BYTES: Final = 16 << 20
_MIN_MEASURED_S: Final = 0.03  # increase the transfer size until a transfer takes at least this long
_REPEATS: Final = 3

RankPair = tuple[int, int]


@dataclass(frozen=True)
class Link:
    """A link between two ranks: the latency of a small message, and the bandwidth in 10^6 bytes per second."""

    source: int
    target: int
    latency_s: float
    mb_s: float


def schedule_rounds(hosts: Sequence[str]) -> list[list[RankPair]]:
    """Return the pairs of ranks to measure in each round. `hosts` contains the host of each rank."""
    size = len(hosts)
    if size * (size - 1) // 2 <= _MAX_SEPARATE_PAIRS:
        return [[(source, target)] for source in range(size) for target in range(source + 1, size)]
    ranks_by_host = {host: [rank for rank in range(size) if hosts[rank] == host] for host in dict.fromkeys(hosts)}
    leaders = [ranks[0] for ranks in ranks_by_host.values()]
    rounds_between_hosts = [
        [(leaders[first], leaders[second]) for first, second in pairs] for pairs in schedule_tournament(len(leaders))
    ]
    rounds_within_hosts = [
        [(first, second) for ranks in ranks_by_host.values() for first, second in list(pairwise(ranks))[offset::2]]
        for offset in (0, 1)
    ]
    return [*(pairs for pairs in rounds_within_hosts if pairs), *rounds_between_hosts[:MAX_ROUNDS]]


def schedule_tournament(num_players: int) -> list[list[RankPair]]:
    """Return the pairs in each round of a round-robin tournament of `num_players` players. Each pair occurs once."""
    players = [*range(num_players), *([-1] if num_players % 2 else [])]  # the player who is paired with -1 sits out
    schedule = []
    for _ in range(len(players) - 1):
        half = len(players) // 2
        pairs = zip(players[:half], reversed(players[half:]), strict=True)
        schedule.append([(min(pair), max(pair)) for pair in pairs if -1 not in pair])
        players = [players[0], players[-1], *players[1:-1]]
    return schedule


def measure_links(
    world: World, schedule: Sequence[Sequence[RankPair]], on_round: Callable[[], None] = lambda: None
) -> list[Link]:
    """Measure each pair of ranks in both directions, and return the links from this rank.

    `schedule` contains the pairs of each round. `on_round` is called at the start of each round. All ranks must call
    this function.
    """
    device = world.device if world.backend == "nccl" else torch.device("cpu")
    buffer = torch.ones(_LAST_BYTES, dtype=torch.uint8, device=device)
    measured_links = []
    for pairs in schedule:
        on_round()
        world.barrier()
        for source, target in pairs:
            with translate_peer_errors():
                if world.rank == source:
                    measured_links.append(_measure_link(world, target, buffer))
                    _echo_messages(target, buffer)
                elif world.rank == target:
                    _echo_messages(source, buffer)
                    measured_links.append(_measure_link(world, source, buffer))
    return measured_links


def _measure_link(world: World, target_rank: int, buffer: Tensor) -> Link:
    header = torch.zeros(1, dtype=torch.int64, device=buffer.device)

    def measure_round_trip(num_bytes: int) -> float:
        """Send `num_bytes` and, if it is positive, that many bytes. Return the seconds until the target's reply."""
        start = time.perf_counter()
        dist.send(header.fill_(num_bytes), target_rank)
        if num_bytes > 0:
            dist.send(buffer[:num_bytes], target_rank)
        dist.recv(header, target_rank)
        if header.device.type == "cuda":  # NCCL calls return immediately, while gloo calls block
            torch.cuda.current_stream(header.device).synchronize()
        return time.perf_counter() - start

    measure_round_trip(-1)  # establishes the connection
    latency_s = min(measure_round_trip(-1) for _ in range(_PINGS)) / 2
    size, elapsed_s = _FIRST_BYTES, 0.0
    while True:
        # Take the shortest time, because the other times can include waiting for a CPU core.
        elapsed_s = min(measure_round_trip(size) for _ in range(_REPEATS))
        if elapsed_s > _MIN_MEASURED_S or size == _LAST_BYTES:
            break
        size *= 4
    dist.send(header.fill_(0), target_rank)
    return Link(world.rank, target_rank, latency_s, size / max(elapsed_s - latency_s, 1e-9) / 1e6)


def _echo_messages(source_rank: int, buffer: Tensor) -> None:
    header = torch.zeros(1, dtype=torch.int64, device=buffer.device)
    while True:
        dist.recv(header, source_rank)
        count = int(header)
        if count == 0:
            return
        if count > 0:
            dist.recv(buffer[:count], source_rank)
        dist.send(header, source_rank)
