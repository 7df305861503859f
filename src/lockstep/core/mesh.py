"""Where a rank stands among the ranks, and which of a step's micro-batches follow from that."""

from __future__ import annotations

from typing import NamedTuple

from lockstep.core.order import part
from lockstep.core.tree import Block, blocks


class Place(NamedTuple):
    """A rank in a grid of replicas, each a group of members.

    Replicas take contiguous parts of a step's micro-batches, so that each can add its own part first. The members of
    one take turns in its part: in round k they hold k * members, k * members + 1, ..., which they add across before the
    next round. `speaks` is false where another rank of the same place has the same results to tell.
    """

    replica: int = 0
    replicas: int = 1
    member: int = 0
    members: int = 1
    speaks: bool = True

    def indices(self, leaves: int) -> list[tuple[int, bool]]:
        """Return this rank's micro-batches of the `leaves` in a step, one for each round, and whether it is a dummy.

        Members go through a round together. Who has none in it computes the step's last one along with its owner.
        """
        return [
            (first + self.member, False) if self.member < holders else (leaves - 1, True)
            for first, holders in self.rounds(leaves)
        ]

    def rounds(self, leaves: int) -> list[tuple[int, int]]:
        """Return the rounds of this rank's replica: the first micro-batch of each, and how many members have one."""
        ours = part(leaves, self.replicas, self.replica)
        alone = self.members == 1  # else the members of a replica without work still do as the others do, once
        firsts = list(ours[:: self.members]) or ([] if alone else [ours.start])
        return [(first, min(self.members, ours.stop - first)) for first in firsts]

    def held(self, leaves: int) -> list[Block]:
        """Return the blocks of the tree (core/tree.py) that this rank is left with once it has added what it can."""
        ours = part(leaves, self.replicas, self.replica)
        return blocks(ours) if self.members == 1 else [Block(leaf, 1) for leaf in ours[self.member :: self.members]]

    def turns(self, batches: int) -> list[int | None]:
        """Return which of `batches` this rank evaluates; None where it only keeps the other members company."""
        rank, ranks = self.replica * self.members + self.member, self.replicas * self.members
        own: list[int | None] = list(range(rank, batches, ranks))
        if self.members == 1:
            return own
        most = len(range(rank - self.member, batches, ranks))
        return own + [None] * (most - len(own))
