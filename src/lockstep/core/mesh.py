"""The device mesh: the number of ranks along each axis, and the micro-batches of a step that each rank computes.

The axes correspond to the usual dims of a torch DeviceMesh: replicas, pipeline stages, shards and slices of tensors.
"""

from __future__ import annotations

from math import prod
from typing import Literal, NamedTuple

from lockstep.core.order import part
from lockstep.core.tree import LeafBlock, blocks

Axis = Literal["replicate", "pipe", "shard", "expert", "context", "tensor"]


class Mesh(NamedTuple):
    """The number of ranks along each axis. Consecutive ranks are neighbors along the last axis.

    - `replicate`: replicas of the model. Each replica has a contiguous part of the micro-batches of a step.
    - `pipe`: ranks with different stages of the model, which send the activations of the same micro-batches along.
    - `shard`: the members of a replica. They gather the parameters from each other. Therefore they process the
      micro-batches of the replica together, in rounds of one micro-batch per member.
    - `expert`: ranks with different experts of a mixture, which send each other the rows for their experts. Like a
      replica, each rank has a contiguous part of the micro-batches. The ranks process their parts in step, in rounds of
      one micro-batch per rank.
    - `context`: ranks with different chunks of the same sequences, which exchange the tensors that attention needs.
    - `tensor`: ranks that each compute a part of every product, for the same micro-batches and chunks of sequences.
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

    def coordinate(self, rank: int) -> Mesh:
        """Return the coordinates of a rank along each axis, counted from 0."""
        found = []
        for length in reversed(self):
            rank, along = divmod(rank, length)
            found.append(along)
        return Mesh(*reversed(found))

    def rank(self, at: Mesh) -> int:
        """Return the rank at these coordinates. The inverse of `coordinate`."""
        number = 0
        for length, along in zip(self, at, strict=True):
            number = number * length + along
        return number

    def groups(self, *axes: Axis) -> list[list[int]]:
        """Return groups of ranks that differ only along these axes. Each rank is in exactly one group."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.size):
            others = self.coordinate(rank)._replace(**dict.fromkeys(axes, 0))
            groups.setdefault(others, []).append(rank)
        return list(groups.values())

    def added_along(self, *axes: Axis) -> tuple[list[DataRank], list[int]]:
        """Return the data ranks of a group that differs only along these axes, ordered by leaves, and this order."""
        lengths = {axis: getattr(self, axis) for axis in axes}
        shard = lengths.pop("shard", 1)  # its ranks take turns in the leaves; along other axes, parts are contiguous
        context = lengths.pop("context", 1)
        among = Mesh(replicate=prod(lengths.values()), shard=shard, context=context)
        places = [among.data_rank(number) for number in range(among.size)]
        order = sorted(range(among.size), key=lambda number: places[number].seat)
        if axes == ("replicate",) and self.expert > 1:  # a rank here adds the sums of all ranks in step with it
            count, step = among.size * self.expert, self.expert
            places = [DataRank(first, count, spans=step) for first in range(0, count, step)]
        return [places[number] for number in order], order

    @property
    def spread(self) -> Mesh:
        """The mesh outside of the products, if the ranks that share products share the sequences there."""
        return self._replace(context=self.context * self.tensor, tensor=1)

    def data_rank(self, rank: int) -> DataRank:
        """Return the data rank of a rank."""
        at = self.coordinate(rank)
        replica, replicas = at.replicate * self.expert + at.expert, self.replicate * self.expert
        first = not (at.pipe or at.tensor)
        return DataRank(replica, replicas, at.shard, self.shard, first, self.expert, at.context, self.context)


class DataRank(NamedTuple):
    """The position of a rank in the distribution of the data: member `member` of replica `replica`.

    Each replica has a contiguous part of the micro-batches of a step, so that it can add its own part first. The
    members of a replica take turns in its part: in round k they have micro-batches k * members, k * members + 1, ...,
    which they add across members before the next round.

    - `first`: whether this rank reports the results, if several ranks have the same results.
    - `in_step`: the number of replicas that run in step. They all have as many rounds as the replica among them with
      the most micro-batches.
    - `seat`, `seats`: `seats` ranks have the same data. Each of them computes its part of the chunks of the sequences,
      in the order of their `seat`, and evaluates separate batches.
    - `spans`: the number of replicas whose sums this rank has: its own replica and the replicas that follow.
    """

    replica: int = 0
    replicas: int = 1
    member: int = 0
    members: int = 1
    first: bool = True
    in_step: int = 1
    seat: int = 0
    seats: int = 1
    spans: int = 1

    def indices(self, leaves: int) -> list[tuple[int, bool]]:
        """Return this rank's micro-batch in each round of a step with `leaves` micro-batches, and whether it's a dummy.

        Members go through a round together. A member that has no micro-batch in a round computes the last micro-batch
        of the step as a dummy.
        """
        return [
            (first + self.member, False) if self.member < holders else (leaves - 1, True)
            for first, holders in self.rounds(leaves)
        ]

    def rounds(self, leaves: int) -> list[tuple[int, int]]:
        """Return the first micro-batch of each round of the replica, and the number of members that have one."""
        ours = part(leaves, self.replicas, self.replica)
        most = part(leaves, self.replicas, self.replica // self.in_step * self.in_step)  # the earlier have one more
        alone = self.members == self.in_step == 1  # else ranks without work still join one round
        rounds = max(-(-len(most) // self.members), 0 if alone else 1)
        firsts = (min(ours.start + number * self.members, ours.stop) for number in range(rounds))
        return [(first, min(self.members, ours.stop - first)) for first in firsts]

    def own_blocks(self, leaves: int, chunks: int = 1) -> list[LeafBlock]:
        """Return the blocks of the tree (core/tree.py) that this rank has after it has added its own leaves.

        If sequences are split into `chunks`, the leaves are chunk 0 of all micro-batches, then chunk 1 of all
        micro-batches, and so on. Therefore a rank that computes one chunk can add up its gradients as it goes, and
        doesn't need to keep the gradients of each micro-batch.
        """
        microbatches = leaves // chunks
        ours = part(microbatches, self.replicas, self.replica)
        own = part(chunks, self.seats, self.seat)
        if self.members > 1:
            [chunk] = own  # members compute one chunk at a time
            return [LeafBlock(chunk * microbatches + leaf, 1) for leaf in ours[self.member :: self.members]]
        ours = range(ours.start, part(microbatches, self.replicas, self.replica + self.spans - 1).stop)
        if len(ours) == microbatches:
            return blocks(range(own.start * microbatches, own.stop * microbatches))
        firsts = [chunk * microbatches for chunk in own]
        return [block for first in firsts for block in blocks(range(first + ours.start, first + ours.stop))]

    @property
    def primary(self) -> bool:
        """Whether this rank counts the micro-batches, among all ranks that have the same micro-batches."""
        return self.first and self.seat == 0

    def turns(self, batches: int) -> list[int | None]:
        """Return the indices of the batches that this rank evaluates, and None for turns without a batch."""
        rank = (self.replica * self.members + self.member) * self.seats + self.seat
        ranks = self.replicas * self.members * self.seats
        own: list[int | None] = list(range(rank, batches, ranks))
        company = self.members * self.in_step
        company *= self.seats if company > 1 else 1
        most = len(range(rank - rank % company, batches, ranks))
        return own + [None] * (most - len(own))
