"""How ranks add by the canonical tree together: which parts of which blocks move to whom, and when what is added.

The sum of a block (core/tree.py) of leaves that one rank holds is a vector of that rank. That of a block with leaves
of several ranks lies with all of them, an equal *share* with each. Where two blocks are added, both move to the ranks
of either, in an order in which each keeps most of what it has. So the vector is dealt out further from level to level,
and each rank sends about as much as in a reduce-scatter, to a number of others that grows with the levels of the tree
alone. Where all ranks hold one block of one size, and are 2, 4, 8, ..., this is recursive halving.

Thakur, Rabenseifner, Gropp 2005, "Optimization of Collective Communication Operations in MPICH", describes that, for
sums whose brackets may be anywhere. For other numbers of ranks it lets some of them give all that they have to others
first; here they take part as all do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple, final

from lockstep.core.tree import LeafBlock

# A rank whose block meets that of very many would have to send to all of them. It sends to so many, and these go on.
FAN_OUT: Final = 16


class Part(NamedTuple):
    """A part of a vector, and the rank that has it, or is to have it."""

    rank: int
    part: range


@final
@dataclass(frozen=True)
class Shares:
    """The ranks that a vector is dealt out to: equal parts of it, one after the other, in their order."""

    ranks: tuple[int, ...]

    def of(self, rank: int, length: int) -> range:
        """Return which part of a vector of this length a rank has; none is an empty range."""
        place = self.places.get(rank)
        return range(0) if place is None else self._parts(place, 1, length)

    def gathering(self, rank: int, length: int) -> Iterator[tuple[list[Part], list[Part]]]:
        """Yield what a rank sends and receives, round by round, until each has all parts.

        Bruck et al. 1997, "Efficient Algorithms for All-to-All Communications in Multiport Message-Passing Systems"
        (IEEE TPDS 8 (11)): what a rank knows are the parts from its own place on, and after each round twice as many.
        """
        place, size, known = self.places[rank], len(self.ranks), 1
        while known < size:
            count = min(known, size - known)
            before, behind = (self.ranks[(place + distance) % size] for distance in (-known, known))
            sent, received = (self._wrapped(first % size, count, length) for first in (place, place + known))
            yield [Part(before, each) for each in sent], [Part(behind, each) for each in received]
            known += count

    def _wrapped(self, place: int, count: int, length: int) -> list[range]:
        """Return the parts of `count` ranks from this place on, together: the first rank follows on the last."""
        parts = self._parts(place, count, length)
        return [range(parts.start, min(parts.stop, length)), range(max(parts.stop - length, 0))]

    # Not the parts of order.part: of these `over` knows at once which has a number.
    def _parts(self, place: int, count: int, length: int) -> range:
        size = len(self.ranks)
        return range(length * place // size, length * (place + count) // size)

    def over(self, part: range, length: int) -> Iterator[Part]:
        """Yield what each rank has of a part of a vector of this length."""
        size = len(self.ranks)
        if part:
            first, last = (((number + 1) * size - 1) // length for number in (part.start, part.stop - 1))
            for place in range(first, last + 1):
                own = self._parts(place, 1, length)
                if shared := range(max(part.start, own.start), min(part.stop, own.stop)):
                    yield Part(self.ranks[place], shared)

    def joined(self, other: Shares) -> Shares:
        """Return the ranks of both, so ordered that each keeps most of what it has."""
        few, many = sorted((self, other), key=lambda each: len(each.ranks))
        centers = few.centers | many.centers
        if len(centers) == len(many.ranks):
            return many
        return Shares(tuple(sorted(centers, key=lambda rank: (centers[rank], rank))))

    def thinned(self, most: int) -> Shares:
        """Return so many of the ranks, evenly spaced, or all where they are fewer."""
        size = len(self.ranks)
        return self if size <= most else Shares(tuple(self.ranks[size * place // most] for place in range(most)))

    @cached_property
    def centers(self) -> dict[int, float]:
        """Where the middle of each rank's part is, from 0 to 1."""
        return {rank: (2 * place + 1) / (2 * len(self.ranks)) for place, rank in enumerate(self.ranks)}

    @cached_property
    def places(self) -> dict[int, int]:
        """Each rank's place in the order."""
        return {rank: place for place, rank in enumerate(self.ranks)}


class Sum(NamedTuple):
    """Two sibling blocks, named by their first leaves, that each of these ranks adds its shares of: in the left one."""

    left: int
    right: int
    shares: Shares


class Move(NamedTuple):
    """A block, named by its first leaf, that is dealt out anew."""

    block: int
    source: Shares
    target: Shares

    def sent(self, rank: int, length: int) -> list[Part]:
        """Return what this rank sends of a vector of this length."""
        return [each for each in self.target.over(self.source.of(rank, length), length) if each.rank != rank]

    def taken(self, rank: int, length: int) -> list[Part]:
        """Return what this rank is to have, from whom: what it has already, from itself."""
        return [*self.source.over(self.target.of(rank, length), length)]


class Round(NamedTuple):
    """What is added, and what moves after that. The moves of a round need nothing of each other."""

    sums: list[Sum]
    moves: list[Move]


class Reduction(NamedTuple):
    """The rounds of a sum over ranks, and how it is dealt out to all of them after the last."""

    rounds: list[Round]
    shares: Shares

    def of_rank(self, rank: int) -> Reduction:
        """Return it without what this rank has no part in."""
        rounds = [
            Round(
                [each for each in sums if rank in each.shares.places],
                [each for each in moves if rank in each.source.places or rank in each.target.places],
            )
            for sums, moves in self.rounds
        ]
        return self._replace(rounds=rounds)


def reduction(held: Sequence[Sequence[LeafBlock]], leaves: int) -> Reduction:
    """Return how ranks that hold these blocks, by rank, add all `leaves` leaves; KeyError where one is missing.

    A block moves as soon as it is there, not only once its sibling is: what ranks hold at first all moves in round 0.
    """
    shares = {block.first: Shares((rank,)) for rank, own in enumerate(held) for block in own}
    ready = dict.fromkeys(shares, 0)  # the round in which a block can move, or is added
    rounds: list[Round] = []

    def round_of(block: int) -> Round:
        while len(rounds) <= ready[block]:
            rounds.append(Round([], []))
        return rounds[ready[block]]

    def deal(block: int, target: Shares) -> None:
        while (source := shares[block]) != target:
            shares[block] = target.thinned(FAN_OUT * len(source.ranks))
            round_of(block).moves.append(Move(block, source, shares[block]))
            ready[block] += 1

    half = 1
    while half < leaves:
        for left in [first for first in shares if first % (2 * half) == 0 and first + half in shares]:
            right = left + half
            target = shares[left].joined(shares[right])
            deal(left, target)
            deal(right, target)
            ready[left] = max(ready[left], ready.pop(right))
            round_of(left).sums.append(Sum(left, right, target))
            del shares[right]
        half *= 2
    if [*shares] != [0] or sum(block.size for own in held for block in own) != leaves:
        raise KeyError(f"the blocks of all ranks are not {leaves} leaves")
    idle = tuple(rank for rank, own in enumerate(held) if not own)
    deal(0, shares[0].joined(Shares(idle)))
    return Reduction(rounds, shares[0])
