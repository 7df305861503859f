"""The device mesh: the number of ranks along each axis, and the micro-batches that each rank computes in a step.

The axes correspond to the usual dimensions of a torch DeviceMesh: data, pipeline, shard and tensor parallelism.
"""

from __future__ import annotations

from math import prod
from typing import Literal, NamedTuple

from lockstep.core.order import get_subrange
from lockstep.core.tree import LeafBlock, split_into_blocks

Axis = Literal["replicate", "pipe", "shard", "expert", "context", "tensor"]


class Mesh(NamedTuple):
    """The number of ranks along each axis. Consecutive ranks are neighbors along the last axis.

    - `replicate`: replicas of the model. Each replica has a contiguous range of the micro-batches of a step.
    - `pipe`: pipeline stages. Each rank sends the activations of its micro-batches to the next stage.
    - `shard`: the members of a replica. Each member holds a shard of the parameters. Because members gather the
      parameters from each other, they process the replica's micro-batches in rounds of one micro-batch per member.
    - `expert`: ranks with different experts of a mixture, which exchange the rows that are routed to these experts.
      Like a replica, each rank has a contiguous range of the micro-batches. The ranks run in lockstep, in rounds of one
      micro-batch per rank.
    - `context`: ranks with different chunks of the same sequences, which exchange the tensors that attention needs.
    - `tensor`: ranks that each compute a part of every matrix product, for the same micro-batches and sequence chunks.
    """

    replicate: int = 1
    pipe: int = 1
    shard: int = 1
    expert: int = 1
    context: int = 1
    tensor: int = 1

    @property
    def size(self) -> int:
        """The number of ranks."""
        return prod(self)

    def get_coordinates(self, rank: int) -> Mesh:
        """Return the coordinate of a rank along each axis, counted from 0."""
        coordinates = []
        for length in reversed(self):
            rank, position = divmod(rank, length)
            coordinates.append(position)
        return Mesh(*reversed(coordinates))

    def get_rank(self, coordinates: Mesh) -> int:
        """Return the rank at these coordinates. This is the inverse of `get_coordinates`."""
        index = 0
        for length, coordinate in zip(self, coordinates, strict=True):
            index = index * length + coordinate
        return index

    def get_groups(self, *axes: Axis) -> list[list[int]]:
        """Return the groups of ranks that differ only along these axes. Each rank is in exactly one group."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.size):
            group_key = self.get_coordinates(rank)._replace(**dict.fromkeys(axes, 0))
            groups.setdefault(group_key, []).append(rank)
        return list(groups.values())

    def get_data_ranks_along(self, *axes: Axis) -> tuple[list[DataRank], list[int]]:
        """Return the data ranks of a group along these axes, in leaf order, and their indices in the group."""
        lengths = {axis: getattr(self, axis) for axis in axes}
        shard = lengths.pop("shard", 1)  # the leaves of a rank along this axis aren't contiguous
        context = lengths.pop("context", 1)
        group_mesh = Mesh(replicate=prod(lengths.values()), shard=shard, context=context)
        data_ranks = [group_mesh.get_data_rank(index) for index in range(group_mesh.size)]
        order = sorted(range(group_mesh.size), key=lambda index: data_ranks[index].sequence_index)
        if axes == ("replicate",) and self.expert > 1:  # each rank already has the sum over its expert group
            count, step = group_mesh.size * self.expert, self.expert
            data_ranks = [DataRank(first, count, num_summed_replicas=step) for first in range(0, count, step)]
        return [data_ranks[index] for index in order], order

    @property
    def sequence_mesh(self) -> Mesh:
        """The mesh for layers that aren't tensor-parallel, in which the `tensor` ranks split the sequences."""
        return self._replace(context=self.context * self.tensor, tensor=1)

    def get_data_rank(self, rank: int) -> DataRank:
        """Return the micro-batches and sequence chunks of a rank."""
        coordinates = self.get_coordinates(rank)
        replica, replicas = coordinates.replicate * self.expert + coordinates.expert, self.replicate * self.expert
        first = not (coordinates.pipe or coordinates.tensor)
        return DataRank(
            replica, replicas, coordinates.shard, self.shard, first, self.expert, coordinates.context, self.context
        )


class DataRank(NamedTuple):
    """The micro-batches and sequence chunks of a rank, which is member `member` of replica `replica`.

    Each replica has a contiguous range of the micro-batches of a step, so that it can add its own gradients first. The
    members of a replica process this range in rounds. In round k, they have micro-batches k * members,
    k * members + 1, ... of the range, and they add the gradients across members before the next round.

    - `reports_results`: whether this rank reports the results on behalf of all ranks with the same results.
    - `num_lockstep_replicas`: the number of replicas that run in lockstep. All of these replicas run as many rounds as
      the replica with the most micro-batches.
    - `sequence_index`, `num_sequence_ranks`: `num_sequence_ranks` ranks have the same data. Each of them computes a
      part of the sequence chunks, in the order of their `sequence_index`, and evaluates separate batches.
    - `num_summed_replicas`: the number of replicas whose sums this rank holds, starting with its own replica.
    """

    replica: int = 0
    num_replicas: int = 1
    member: int = 0
    num_members: int = 1
    reports_results: bool = True
    num_lockstep_replicas: int = 1
    sequence_index: int = 0
    num_sequence_ranks: int = 1
    num_summed_replicas: int = 1

    def get_microbatches(self, num_microbatches: int) -> list[tuple[int, bool]]:
        """Return this rank's micro-batch in each round of a step, and whether it is a dummy.

        `num_microbatches` is the number of micro-batches in the step. A member without a micro-batch in a round still
        takes part, and computes the last micro-batch of the step as a dummy.
        """
        return [
            (first + self.member, False) if self.member < holders else (num_microbatches - 1, True)
            for first, holders in self.get_rounds(num_microbatches)
        ]

    def get_rounds(self, num_microbatches: int) -> list[tuple[int, int]]:
        """Return, for each round, the replica's first micro-batch and how many members have a micro-batch."""
        own_range = get_subrange(num_microbatches, self.num_replicas, self.replica)
        # Among the replicas in lockstep, the first replica has the most micro-batches.
        longest = get_subrange(
            num_microbatches, self.num_replicas, self.replica // self.num_lockstep_replicas * self.num_lockstep_replicas
        )
        # Ranks that depend on each other must take part in at least one round, even without a micro-batch.
        is_independent = self.num_members == self.num_lockstep_replicas == 1
        rounds = max(-(-len(longest) // self.num_members), 0 if is_independent else 1)
        first_indices = (min(own_range.start + number * self.num_members, own_range.stop) for number in range(rounds))
        return [(first, min(self.num_members, own_range.stop - first)) for first in first_indices]

    def get_own_blocks(self, num_leaves: int, num_chunks: int = 1) -> list[LeafBlock]:
        """Return the blocks of the reduction tree (core/tree.py) that this rank holds after it has added its leaves.

        `num_leaves` is the number of leaves. If sequences are split into `num_chunks` chunks, the leaves are chunk 0 of
        all micro-batches, then chunk 1 of all micro-batches, and so on. Therefore a rank that computes a single chunk
        can accumulate its gradients over micro-batches.
        """
        microbatches = num_leaves // num_chunks
        own_range = get_subrange(microbatches, self.num_replicas, self.replica)
        own_chunks = get_subrange(num_chunks, self.num_sequence_ranks, self.sequence_index)
        if self.num_members > 1:
            [chunk] = own_chunks  # members compute one chunk at a time
            return [LeafBlock(chunk * microbatches + leaf, 1) for leaf in own_range[self.member :: self.num_members]]
        own_range = range(
            own_range.start,
            get_subrange(microbatches, self.num_replicas, self.replica + self.num_summed_replicas - 1).stop,
        )
        if len(own_range) == microbatches:
            return split_into_blocks(range(own_chunks.start * microbatches, own_chunks.stop * microbatches))
        first_indices = [chunk * microbatches for chunk in own_chunks]
        return [
            block
            for first in first_indices
            for block in split_into_blocks(range(first + own_range.start, first + own_range.stop))
        ]

    @property
    def counts_microbatches(self) -> bool:
        """Whether this rank counts its micro-batches. Only one of the ranks with the same micro-batches does."""
        return self.reports_results and self.sequence_index == 0

    def get_evaluation_batches(self, num_batches: int) -> list[int | None]:
        """Return the indices of the batches that this rank evaluates, out of `num_batches` batches.

        Padded with None, because all ranks that run in lockstep must take part in the same number of rounds.
        """
        rank = (self.replica * self.num_members + self.member) * self.num_sequence_ranks + self.sequence_index
        ranks = self.num_replicas * self.num_members * self.num_sequence_ranks
        own_batches: list[int | None] = list(range(rank, num_batches, ranks))
        lockstep_ranks = self.num_members * self.num_lockstep_replicas
        lockstep_ranks *= self.num_sequence_ranks if lockstep_ranks > 1 else 1
        max_batches = len(range(rank - rank % lockstep_ranks, num_batches, ranks))
        return own_batches + [None] * (max_batches - len(own_batches))
