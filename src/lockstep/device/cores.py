"""CPU binding: each rank runs on cores near its GPU. Ranks whose GPUs are near the same cores share these cores."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lockstep.core.order import cut

Cores = frozenset[int]


@dataclass(frozen=True)
class Seat:
    """The host of a rank, the cores near its GPU (empty if unknown), and the cores that the rank may use.

    `limited` is true if the rank may not use all cores of the host.
    """

    host: str
    near: Cores
    usable: Cores
    limited: bool


@dataclass(frozen=True)
class Binding:
    """The cores that a rank is bound to, and the reason."""

    cores: Cores
    reason: str


def parse(text: str) -> Cores:
    """Parse a list of cores in the Linux format, such as `0-3,8,10-11`. Raises ValueError if the list isn't valid."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, dash, last = part.partition("-")
        cores |= set(range(int(first), int(last if dash else first) + 1))
    return frozenset(cores)


def format_cores(cores: Iterable[int]) -> str:
    """Return a list of cores in the Linux format, such as `0-3,8,10-11`."""
    ranges: list[list[int]] = []
    for core in sorted(cores):
        if ranges and ranges[-1][1] == core - 1:
            ranges[-1][1] = core
        else:
            ranges.append([core, core])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in ranges)


def choose_cores(rank: int, seats: Sequence[Seat], siblings: Mapping[int, int], least: int) -> Binding:
    """Return the cores to bind `rank` to, given the `seats` of all ranks.

    The cores near a GPU are divided among the ranks whose GPUs are near these cores. `least` is the number of cores
    that a rank needs for its threads. If a rank would get fewer cores, the ranks share all of these cores instead.

    `siblings` maps each core of the host to the first logical core on the same physical core. Siblings are always
    assigned to the same rank. A rank that was bound before it started keeps its cores. If several ranks of a host have
    the same limited cores, the limit belongs to their container or job, and the ranks don't count as bound.
    """
    own_seat = seats[rank]
    host_ranks = [index for index, seat in enumerate(seats) if seat.host == own_seat.host]
    if own_seat.limited and (
        len(host_ranks) == 1 or any(seats[index].usable != own_seat.usable for index in host_ranks)
    ):
        return Binding(own_seat.usable, "bound before it started")
    if not own_seat.near:
        return Binding(own_seat.usable, "the kernel does not report the cores near its GPU")
    near_cores = own_seat.near & own_seat.usable
    if not near_cores:
        return Binding(own_seat.usable, "it may not use any of the cores near its GPU")
    sharers = [index for index in host_ranks if seats[index].near == own_seat.near]
    if len(sharers) == 1:
        return Binding(near_cores, "near its GPU")
    physical = sorted({siblings.get(core, core) for core in near_cores})
    physical_parts = [frozenset(physical[index] for index in part) for part in cut(len(physical), len(sharers))]
    parts = [frozenset(core for core in near_cores if siblings.get(core, core) in part) for part in physical_parts]
    if min(map(len, parts)) < least:
        return Binding(near_cores, f"near its GPU, shared by {len(sharers)} ranks: too few to divide")
    return Binding(parts[sharers.index(rank)], f"near its GPU, divided among {len(sharers)} ranks")
