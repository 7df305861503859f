"""The communication schedule for adding tensors over ranks in the order of the reduction tree.

If all leaves of a block (core/tree.py) are on a single rank, this rank has the sum of the block as a full vector. If
the leaves are on several ranks, the sum is sharded, and each of these ranks has an equal *share*. To add two blocks,
both are resharded over the union of their ranks, such that each rank keeps most of its share. Therefore the shares get
smaller at each level of the tree. Each rank sends about the same amount of data as in a reduce-scatter, and the number
of its receivers only grows with the number of levels. If the number of ranks is a power of two, and each rank has one
block of the same size, the schedule is recursive halving.

Thakur, Rabenseifner, Gropp 2005, "Optimization of Collective Communication Operations in MPICH", describe recursive
halving for reductions with arbitrary operators. If the number of ranks isn't a power of two, some ranks in their
algorithm first send their full vectors to other ranks. Here, all ranks take part in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple, final

from lockstep.core.tree import LeafBlock

# The maximum number of ranks that a block on a single rank is sent to at once. More ranks get it in several hops.
FAN_OUT: Final = 16


class VectorPart(NamedTuple):
    """A range of a vector, and the rank that holds, sends or receives it."""

    rank: int
    element_range: range


@final
@dataclass(frozen=True)
class Shares:
    """The ranks over which a vector is sharded, in the order of their parts, which have about the same length."""

    ranks: tuple[int, ...]

    def get_part(self, rank: int, length: int) -> range:
        """Return the range of a vector of this length that `rank` holds. It is empty if `rank` holds no part."""
        position = self.positions.get(rank)
        return range(0) if position is None else self._get_element_range(position, 1, length)

    def iterate_gather_rounds(self, rank: int, length: int) -> Iterator[tuple[list[VectorPart], list[VectorPart]]]:
        """Yield the parts that `rank` sends and the parts that it receives, for each round of an all-gather.

        Bruck et al. 1997, "Efficient Algorithms for All-to-All Communications in Multiport Message-Passing Systems"
        (IEEE TPDS 8 (11)): each rank holds consecutive parts, starting with its own, and their number doubles in each
        round.
        """
        position, size, held_parts = self.positions[rank], len(self.ranks), 1
        while held_parts < size:
            count = min(held_parts, size - held_parts)
            previous_rank, next_rank = (
                self.ranks[(position + distance) % size] for distance in (-held_parts, held_parts)
            )
            sent, received = (
                self._split_wrapped(first % size, count, length) for first in (position, position + held_parts)
            )
            yield [VectorPart(previous_rank, part) for part in sent], [VectorPart(next_rank, part) for part in received]
            held_parts += count

    def _split_wrapped(self, position: int, num_parts: int, length: int) -> list[range]:
        """Return the parts of `num_parts` ranks from `position` on, as two ranges, because they can wrap around."""
        parts = self._get_element_range(position, num_parts, length)
        return [range(parts.start, min(parts.stop, length)), range(max(parts.stop - length, 0))]

    # Not the same split as order.get_subrange: here, the part that contains an element can be found in constant time.
    def _get_element_range(self, first_part: int, num_parts: int, vector_length: int) -> range:
        size = len(self.ranks)
        return range(vector_length * first_part // size, vector_length * (first_part + num_parts) // size)

    def find_overlaps(self, element_range: range, length: int) -> Iterator[VectorPart]:
        """Yield the parts that overlap the range `element_range` of a vector, limited to this range."""
        size = len(self.ranks)
        if element_range:
            first, last = (
                ((element + 1) * size - 1) // length for element in (element_range.start, element_range.stop - 1)
            )
            for position in range(first, last + 1):
                own_part = self._get_element_range(position, 1, length)
                if overlap := range(max(element_range.start, own_part.start), min(element_range.stop, own_part.stop)):
                    yield VectorPart(self.ranks[position], overlap)

    def union(self, other: Shares) -> Shares:
        """Return shares over the ranks of both, ordered such that each rank keeps most of its current share."""
        smaller, larger = sorted((self, other), key=lambda shares: len(shares.ranks))
        centers = smaller.centers | larger.centers
        if len(centers) == len(larger.ranks):
            return larger
        return Shares(tuple(sorted(centers, key=lambda rank: (centers[rank], rank))))

    def select_evenly(self, max_ranks: int) -> Shares:
        """Return shares over at most `max_ranks` of the ranks, evenly spaced."""
        size = len(self.ranks)
        return (
            self
            if size <= max_ranks
            else Shares(tuple(self.ranks[size * position // max_ranks] for position in range(max_ranks)))
        )

    @cached_property
    def centers(self) -> dict[int, float]:
        """The center of each rank's part of the vector, from 0 to 1."""
        return {rank: (2 * position + 1) / (2 * len(self.ranks)) for position, rank in enumerate(self.ranks)}

    @cached_property
    def positions(self) -> dict[int, int]:
        """The index of each rank's part."""
        return {rank: position for position, rank in enumerate(self.ranks)}


class BlockSum(NamedTuple):
    """The addition of block `right` to its sibling `left`. Blocks are identified by their first leaves."""

    left: int
    right: int
    shares: Shares


class BlockMove(NamedTuple):
    """The resharding of a block from `source` to `target`. The block is identified by its first leaf."""

    block: int
    source: Shares
    target: Shares

    def get_sent_parts(self, rank: int, length: int) -> list[VectorPart]:
        """Return the parts of a vector of this length that `rank` sends, each with its receiver."""
        return [
            part for part in self.target.find_overlaps(self.source.get_part(rank, length), length) if part.rank != rank
        ]

    def get_received_parts(self, rank: int, length: int) -> list[VectorPart]:
        """Return the parts that `rank` holds after the move, each with its sender, which can be `rank` itself."""
        return [*self.source.find_overlaps(self.target.get_part(rank, length), length)]


class ReductionRound(NamedTuple):
    """A round of the schedule. All sums come before all moves, and the moves are independent of each other."""

    sums: list[BlockSum]
    moves: list[BlockMove]


class Reduction(NamedTuple):
    """The schedule of a reduction over ranks, and the shares of the result. Every rank has a share."""

    rounds: list[ReductionRound]
    shares: Shares

    def for_rank(self, rank: int) -> Reduction:
        """Return the schedule with only the sums and moves in which `rank` takes part."""
        rounds = [
            ReductionRound(
                [entry for entry in sums if rank in entry.shares.positions],
                [entry for entry in moves if rank in entry.source.positions or rank in entry.target.positions],
            )
            for sums, moves in self.rounds
        ]
        return self._replace(rounds=rounds)


def plan_reduction(blocks_by_rank: Sequence[Sequence[LeafBlock]], num_leaves: int) -> Reduction:
    """Return the schedule that adds all leaves over the ranks, given the blocks that each rank holds.

    `num_leaves` is the number of leaves of the reduction tree. A block is sent as soon as its sum is complete, even if
    its sibling's sum isn't. Therefore all initial blocks are sent in round 0. Raises KeyError if a leaf is missing.
    """
    shares = {block.first: Shares((rank,)) for rank, rank_blocks in enumerate(blocks_by_rank) for block in rank_blocks}
    next_rounds = dict.fromkeys(shares, 0)  # the first round in which each block can be sent or added
    rounds: list[ReductionRound] = []

    def get_round(block: int) -> ReductionRound:
        while len(rounds) <= next_rounds[block]:
            rounds.append(ReductionRound([], []))
        return rounds[next_rounds[block]]

    def reshard(block_index: int, target_shares: Shares) -> None:
        while (source := shares[block_index]) != target_shares:
            shares[block_index] = target_shares.select_evenly(FAN_OUT * len(source.ranks))
            get_round(block_index).moves.append(BlockMove(block_index, source, shares[block_index]))
            next_rounds[block_index] += 1

    half = 1
    while half < num_leaves:
        for left in [first for first in shares if first % (2 * half) == 0 and first + half in shares]:
            right = left + half
            target = shares[left].union(shares[right])
            reshard(left, target)
            reshard(right, target)
            next_rounds[left] = max(next_rounds[left], next_rounds.pop(right))
            get_round(left).sums.append(BlockSum(left, right, target))
            del shares[right]
        half *= 2
    if [*shares] != [0] or sum(block.size for rank_blocks in blocks_by_rank for block in rank_blocks) != num_leaves:
        raise KeyError(f"the blocks of all ranks must cover exactly {num_leaves} leaves")
    idle_ranks = tuple(rank for rank, rank_blocks in enumerate(blocks_by_rank) if not rank_blocks)
    reshard(0, shares[0].union(Shares(idle_ranks)))
    return Reduction(rounds, shares[0])
