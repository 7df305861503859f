"""The edges of a pipeline: carriers between a rank and its neighbors, one for each direction."""

from collections.abc import Collection
from typing import NamedTuple, final

import torch
import torch.distributed as dist

from lockstep.comm.canonical import transfer_tensors
from lockstep.comm.carrier import Carrier
from lockstep.comm.process_groups import ProcessGroups


class Edge(NamedTuple):
    """The carriers that send to a neighbor (`outbound`) and receive from it (`inbound`).

    The two directions never block each other. `peer` is the group rank of the neighbor.
    """

    outbound: Carrier
    inbound: Carrier
    peer: int


@final
class Edges:
    """The edges of this rank. Edges are created lazily."""

    def __init__(self, groups: ProcessGroups, rank: int, world_size: int, device: torch.device) -> None:
        self._groups = groups
        self._rank = rank
        self._size = world_size
        self._device = device
        self._edges: dict[int, Edge] = {}

    def connect(self, neighbors: Collection[int]) -> dict[int, Edge]:
        """Return the edge to each rank in `neighbors`. All ranks must call this. Neighbors must list each other."""
        missing = set(neighbors) - self._edges.keys()
        if self._groups.backend == "nccl":
            self._edges |= self._create_one_way_edges(missing)
        elif missing:  # gloo sends and receives on separate threads, so both directions can share a group
            carrier = self._groups.make_group_carrier(self._groups.main, range(self._size), "between stages")
            self._edges |= {rank: Edge(carrier, carrier, rank) for rank in missing}
        return {rank: self._edges[rank] for rank in neighbors}

    def _create_one_way_edges(self, neighbors: Collection[int]) -> dict[int, Edge]:
        """Create a separate process group for each direction, and return the edge to each rank in `neighbors`.

        NCCL runs the operations of a group in order, and a send only completes after its receive has started. If both
        directions shared a group, two ranks that both send first would deadlock. torch's pipelines also use separate
        groups with torch.distributed.config.pipeline_per_edge_p2p.
        """
        own_rank = self._rank
        adjacency = torch.zeros(self._size, self._size, dtype=torch.uint8)
        adjacency[own_rank, list(neighbors)] = 1
        # All ranks create all groups, including groups that they aren't members of. Otherwise, the names that torch
        # assigns to a group could differ between ranks.
        directions = [(int(source), int(target)) for source, target in self._groups.add_(adjacency).nonzero()]
        carriers = {direction: carrier for direction in directions if (carrier := self._connect_one_way(*direction))}
        return {
            rank: Edge(carriers[own_rank, rank], carriers[rank, own_rank], int(rank > own_rank)) for rank in neighbors
        }

    def _connect_one_way(self, source: int, target: int) -> Carrier | None:
        """Create a process group of two ranks. If this rank is a member, connect it to its peer and return the carrier.

        Connecting blocks until the peer also connects. A lazy connection in the middle of a step could deadlock,
        because the peer might be waiting for this rank.
        """
        ranks = sorted((source, target))
        group = self._groups.new_group(ranks)
        if self._rank not in ranks:
            return None
        assert isinstance(group, dist.ProcessGroup)
        carrier = self._groups.make_group_carrier(group, ranks, "between stages")
        peer = target if self._rank == source else source
        first_message = [(torch.zeros(1, device=self._device), int(peer > self._rank))]
        transfer_tensors(
            carrier, first_message if self._rank == source else [], first_message if self._rank == target else []
        )
        return carrier
