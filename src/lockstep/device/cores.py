"""Which cores of its host a rank may run on: those near its card, shared out among the ranks whose cards are there."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lockstep.core.order import cut

Cores = frozenset[int]


@dataclass(frozen=True)
class Seat:
    """Where a rank runs: its host, the cores near its card (none: nobody knows), and those it may use already.

    `limited`: these are not all cores of the host.
    """

    host: str
    near: Cores
    usable: Cores
    limited: bool


@dataclass(frozen=True)
class Binding:
    """The cores of a rank, and why it has these."""

    cores: Cores
    why: str


def parse(text: str) -> Cores:
    """Return the cores of a list as Linux writes it: `0-3,8,10-11`. ValueError where it is none."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, dash, last = part.partition("-")
        found |= set(range(int(first), int(last if dash else first) + 1))
    return frozenset(found)


def format_cores(cores: Iterable[int]) -> str:
    """Return the cores as Linux writes them: `0-3,8,10-11`."""
    ranges: list[list[int]] = []
    for core in sorted(cores):
        if ranges and ranges[-1][1] == core - 1:
            ranges[-1][1] = core
        else:
            ranges.append([core, core])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in ranges)


def choose_cores(rank: int, seats: Sequence[Seat], siblings: Mapping[int, int], least: int) -> Binding:
    """Return the cores of `rank` among the `seats` of all ranks; with too few to share, those near its card are shared.

    `siblings` has, for each core of its host, the first core of the same physical one: those stay together. `least` is
    how many cores a rank needs for its threads. A rank that somebody bound already keeps what it has. Cores that all
    ranks of a host lack are the limit of a container or a job, and bind none of them.
    """
    own = seats[rank]
    here = [number for number, seat in enumerate(seats) if seat.host == own.host]
    if own.limited and (len(here) == 1 or any(seats[number].usable != own.usable for number in here)):
        return Binding(own.usable, "bound before it started")
    if not own.near:
        return Binding(own.usable, "the kernel does not say which cores are near its card")
    near = own.near & own.usable
    if not near:
        return Binding(own.usable, "it may use none of the cores near its card")
    sharers = [number for number in here if seats[number].near == own.near]
    if len(sharers) == 1:
        return Binding(near, "near its card")
    physical = sorted({siblings.get(core, core) for core in near})
    whole = [frozenset(physical[number] for number in part) for part in cut(len(physical), len(sharers))]
    parts = [frozenset(core for core in near if siblings.get(core, core) in part) for part in whole]
    if min(map(len, parts)) < least:
        return Binding(near, f"near its card, as {len(sharers)} ranks: too few to share out")
    return Binding(parts[sharers.index(rank)], f"near its card, shared out among {len(sharers)} ranks")
