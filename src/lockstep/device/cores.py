"""CPU binding: each rank runs on cores near its GPU. Ranks whose GPUs are near the same cores divide these cores."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lockstep.core.order import split_range

Cores = frozenset[int]


@dataclass(frozen=True)
class CpuLocality:
    """The CPU cores that are relevant to binding a rank on `host`.

    - `near_cores`: the cores near its GPU, or an empty set if they are unknown.
    - `usable_cores`: the cores that the rank is allowed to use.
    - `is_limited`: whether there are cores on the host that the rank isn't allowed to use.
    """

    host: str
    near_cores: Cores
    usable_cores: Cores
    is_limited: bool


@dataclass(frozen=True)
class CpuBinding:
    """The cores to bind a rank to, and the reason for this choice."""

    cores: Cores
    reason: str


def parse_cores(text: str) -> Cores:
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


def choose_cores(
    rank: int, localities: Sequence[CpuLocality], first_siblings: Mapping[int, int], min_cores: int
) -> CpuBinding:
    """Return the cores to bind `rank` to, given the `localities` of all ranks.

    The cores near a GPU are divided among the ranks whose GPUs are near these cores. `min_cores` is the number of cores
    that a rank needs for its threads. If a rank would get fewer cores, the ranks share all of these cores instead.

    `first_siblings` maps each core of the host to the first logical core on the same physical core. Siblings are always
    assigned to the same rank. A rank that the launcher has already bound keeps its cores. If all ranks of a host have
    the same limited cores, the limit comes from their container or job, and the ranks don't count as bound.
    """
    own = localities[rank]
    host_ranks = [index for index, locality in enumerate(localities) if locality.host == own.host]
    if own.is_limited and (
        len(host_ranks) == 1 or any(localities[index].usable_cores != own.usable_cores for index in host_ranks)
    ):
        return CpuBinding(own.usable_cores, "bound before it started")
    if not own.near_cores:
        return CpuBinding(own.usable_cores, "the kernel does not report the cores near its GPU")
    near_cores = own.near_cores & own.usable_cores
    if not near_cores:
        return CpuBinding(own.usable_cores, "none of the cores near its GPU are available to it")
    sharing_ranks = [index for index in host_ranks if localities[index].near_cores == own.near_cores]
    if len(sharing_ranks) == 1:
        return CpuBinding(near_cores, "near its GPU")
    physical_cores = sorted({first_siblings.get(core, core) for core in near_cores})
    physical_parts = [
        frozenset(physical_cores[index] for index in part)
        for part in split_range(len(physical_cores), len(sharing_ranks))
    ]
    parts = [
        frozenset(core for core in near_cores if first_siblings.get(core, core) in part) for part in physical_parts
    ]
    if min(map(len, parts)) < min_cores:
        return CpuBinding(near_cores, f"near its GPU, shared by {len(sharing_ranks)} ranks: too few to divide")
    return CpuBinding(parts[sharing_ranks.index(rank)], f"near its GPU, divided among {len(sharing_ranks)} ranks")
