"""The ranks as a mesh: how many there are along each axis, and which of a step's micro-batches a rank computes.

The axes are those of torch's DeviceMesh in the field: replicas of a model, pipeline stages, shards, slices of a tensor.
"""

from __future__ import annotations

from math import prod
from typing import Literal, NamedTuple

from lockstep.core.order import part
from lockstep.core.tree import LeafBlock, blocks

Axis = Literal["replicate", "pipe", "shard", "expert", "context", "tensor"]


class Mesh(NamedTuple):
    """The number of ranks along each axis. Ranks are numbered along the last axis first: these are neighbours.

    `replicate`: replicas of the model, each of which has a contiguous part of a step's micro-batches.
    `pipe`: ranks that pass the same micro-batches on to each other, each with other stages of the model.
    `shard`: the members of a replica, which gather what they compute with from each other, and so go through its
    micro-batches together, in rounds of one for each.
    `expert`: ranks with other experts of a mixture each, which send each other what is for these. Each has a contiguous
    part of the micro-batches, as a replica has, and goes through it in step with the others, in rounds of one each.
    `context`: ranks that compute other chunks of the same sequences, and send each other what attention needs.
    `tensor`: ranks that compute a part of each product, for the same micro-batches and chunks of sequences.
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
        """Return where a rank is along each axis, counted from 0."""
        found = []
        for length in reversed(self):
            rank, along = divmod(rank, length)
            found.append(along)
        return Mesh(*reversed(found))

    def rank(self, at: Mesh) -> int:
        """Return which rank is at these coordinates: `coordinate` the other way."""
        number = 0
        for length, along in zip(self, at, strict=True):
            number = number * length + along
        return number

    def groups(self, *axes: Axis) -> list[list[int]]:
        """Return the ranks, group by group, that differ along these axes alone: each rank is in one group."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.size):
            others = self.coordinate(rank)._replace(**dict.fromkeys(axes, 0))
            groups.setdefault(others, []).append(rank)
        return list(groups.values())

    def added_along(self, *axes: Axis) -> tuple[list[DataRank], list[int]]:
        """Return the data of ranks that differ along these axes alone, in the order of their leaves, and that order."""
        lengths = {axis: getattr(self, axis) for axis in axes}
        shard = lengths.pop("shard", 1)  # its ranks take turns in the leaves; those of other axes have contiguous parts
        context = lengths.pop("context", 1)
        among = Mesh(replicate=prod(lengths.values()), shard=shard, context=context)
        places = [among.data_rank(number) for number in range(among.size)]
        order = sorted(range(among.size), key=lambda number: places[number].seat)
        if axes == ("replicate",) and self.expert > 1:  # what a rank adds here is of all ranks in step with it
            count, step = among.size * self.expert, self.expert
            places = [DataRank(first, count, spans=step) for first in range(0, count, step)]
        return [places[number] for number in order], order

    @property
    def spread(self) -> Mesh:
        """This mesh where the ranks that share products share sequences, too: as they are outside of the products."""
        return self._replace(context=self.context * self.tensor, tensor=1)

    def data_rank(self, rank: int) -> DataRank:
        """Return which data a rank computes."""
        at = self.coordinate(rank)
        replica, replicas = at.replicate * self.expert + at.expert, self.replicate * self.expert
        first = not (at.pipe or at.tensor)
        return DataRank(replica, replicas, at.shard, self.shard, first, self.expert, at.context, self.context)


class DataRank(NamedTuple):
    """A rank as the data is dealt out: member `member` of replica `replica`.

    Replicas have contiguous parts of a step's micro-batches, so that each can add its own part first. The members of
    one take turns in its part: in round k they have k * members, k * members + 1, ..., which they add across before the
    next round. Of several ranks that know the same one is `first`: it reports that. So many replicas as are `in_step`
    have as many rounds as the one of them with most micro-batches. Of `seats` ranks with the same data each computes as
    many chunks of the sequences, in the order of their `seat`, and evaluates by itself. A rank that has the sums of
    several replicas, its own and those that follow, `spans` so many.
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
        """Return this rank's micro-batches of the `leaves` in a step, one for each round, and whether it is a dummy.

        Members go through a round together. One that has none in it computes the step's last one along with its owner.
        """
        return [
            (first + self.member, False) if self.member < holders else (leaves - 1, True)
            for first, holders in self.rounds(leaves)
        ]

    def rounds(self, leaves: int) -> list[tuple[int, int]]:
        """Return the rounds of this rank's replica: the first micro-batch of each, and how many members have one."""
        ours = part(leaves, self.replicas, self.replica)
        most = part(leaves, self.replicas, self.replica // self.in_step * self.in_step)  # the earlier have one more
        alone = self.members == self.in_step == 1  # else ranks without work still do as the others do, once
        rounds = max(-(-len(most) // self.members), 0 if alone else 1)
        firsts = (min(ours.start + number * self.members, ours.stop) for number in range(rounds))
        return [(first, min(self.members, ours.stop - first)) for first in firsts]

    def own_blocks(self, leaves: int, chunks: int = 1) -> list[LeafBlock]:
        """Return the blocks of the tree (core/tree.py) that this rank is left with once it has added what it can.

        Where sequences are cut into `chunks`, the leaves are chunk 0 of all micro-batches, then chunk 1 of all: so a
        rank that computes one chunk adds up all that it has, and need not keep the gradients of each micro-batch.
        """
        microbatches = leaves // chunks
        ours = part(microbatches, self.replicas, self.replica)
        own = part(chunks, self.seats, self.seat)
        if self.members > 1:
            [chunk] = own  # which members compute one at a time
            return [LeafBlock(chunk * microbatches + leaf, 1) for leaf in ours[self.member :: self.members]]
        ours = range(ours.start, part(microbatches, self.replicas, self.replica + self.spans - 1).stop)
        if len(ours) == microbatches:
            return blocks(range(own.start * microbatches, own.stop * microbatches))
        firsts = [chunk * microbatches for chunk in own]
        return [block for first in firsts for block in blocks(range(first + ours.start, first + ours.stop))]

    @property
    def primary(self) -> bool:
        """Whether this rank, of all with the same micro-batches, is the one that counts them."""
        return self.first and self.seat == 0

    def turns(self, batches: int) -> list[int | None]:
        """Return which of `batches` this rank evaluates; None where it only keeps the other members company."""
        rank = (self.replica * self.members + self.member) * self.seats + self.seat
        ranks = self.replicas * self.members * self.seats
        own: list[int | None] = list(range(rank, batches, ranks))
        company = self.members * self.in_step
        company *= self.seats if company > 1 else 1
        most = len(range(rank - rank % company, batches, ranks))
        return own + [None] * (most - len(own))
