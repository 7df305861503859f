"""The edges of a pipeline: the carriers between a rank and each of its neighbours, one for each direction."""

from collections.abc import Collection
from typing import NamedTuple, final

import torch
import torch.distributed as dist

from lockstep.comm.canonical import move
from lockstep.comm.carrier import Carrier
from lockstep.comm.process_groups import ProcessGroups


class Edge(NamedTuple):
    """What carries tensors to another rank, and from it; `peer` is its number there. Neither waits for the other."""

    there: Carrier
    back: Carrier
    peer: int


@final
class Edges:
    """The edges of this rank, each made when it is first asked for."""

    def __init__(self, groups: ProcessGroups, rank: int, size: int, device: torch.device) -> None:
        self._groups = groups
        self._rank = rank
        self._size = size
        self._device = device
        self._edges: dict[int, Edge] = {}

    def to(self, neighbours: Collection[int]) -> dict[int, Edge]:
        """Return the edges to `neighbours`. All ranks call it, and of two ranks either both name the other or none."""
        new = set(neighbours) - self._edges.keys()
        if self._groups.backend == "nccl":
            self._edges |= self._one_way_edges(new)
        elif new:  # gloo's threads send and receive side by side
            both = self._groups.carrier(self._groups.main, range(self._size), "between stages")
            self._edges |= {rank: Edge(both, both, rank) for rank in new}
        return {rank: self._edges[rank] for rank in neighbours}

    def _one_way_edges(self, neighbours: Collection[int]) -> dict[int, Edge]:
        """Return edges with a group for each direction.

        NCCL runs what is exchanged in one group in order, and a send ends only when its receiver has begun: in a group
        for both directions two ranks which send first would wait for each other for ever. (torch's pipelines do the
        same where they are told to: torch.distributed.config.pipeline_per_edge_p2p.)
        """
        own = self._rank
        wanted = torch.zeros(self._size, self._size, dtype=torch.uint8)
        wanted[own, list(neighbours)] = 1
        # All ranks make the groups of all: those that only their own ranks make have names which torch lets differ.
        ways = [(int(source), int(target)) for source, target in self._groups.add_(wanted).nonzero()]
        made = {way: carrier for way in ways if (carrier := self._one_way(*way))}
        return {rank: Edge(made[own, rank], made[rank, own], int(rank > own)) for rank in neighbours}

    def _one_way(self, source: int, target: int) -> Carrier | None:
        """Make a group of two ranks; where this is one of them, connect it to the other and return what carries.

        To connect is to wait for the other, and in the middle of a step that might be waiting for this one.
        """
        ranks = sorted((source, target))
        group = self._groups.new(ranks)
        if self._rank not in ranks:
            return None
        assert isinstance(group, dist.ProcessGroup)
        carrier = self._groups.carrier(group, ranks, "between stages")
        other = target if self._rank == source else source
        first = [(torch.zeros(1, device=self._device), int(other > self._rank))]
        move(carrier, first if self._rank == source else [], first if self._rank == target else [])
        return carrier
