"""The canonical tree between processes: the same brackets as in one process, over the network.

Rank r of W holds the pieces that are its data rank's (core/mesh.py). Two ways lead to the same sum:

*Halving and doubling*, where every rank holds one block and all blocks are of one size (W and M/W powers of two):
level by level, rank r and its sibling r XOR 2^k swap halves of what they still own and add; then the way back without
adding. Each rank sends 2 (W-1)/W of the vector, what a ring all-reduce sends.

*Direct exchange* otherwise: the vector is cut into W chunks, each rank sends all its pieces of chunk j to rank j, which
adds them by the tree and sends the sum to all. Ranks may hold no piece (fewer micro-batches than processes) or several.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, final

import torch
from torch import Tensor

from lockstep.comm.carrier import Addressed, Carrier
from lockstep.comm.peer_errors import translate_peer_errors
from lockstep.core.mesh import DataRank
from lockstep.core.order import cut
from lockstep.core.tree import LeafBlock, total


def add_(left: Tensor, right: Tensor) -> Tensor:
    """Add in the memory of `left`."""
    return left.add_(right)


class Sum(Protocol):
    """Adds what ranks have of a flat vector: CanonicalSum, or what stands in its place."""

    def __call__(self, pieces: Mapping[LeafBlock, Tensor], leaves: int, like: Tensor) -> Tensor: ...


def own_sum(pieces: Mapping[LeafBlock, Tensor], like: Tensor) -> Tensor:
    """Add a rank's own pieces from left to right, in the memory of the first; zeros like `like` where it has none."""
    if not pieces:
        return torch.zeros_like(like)
    first, *others = (pieces[block] for block in sorted(pieces))
    for other in others:
        add_(first, other)
    return first


@final
@dataclass(eq=False)
class CanonicalSum:
    """Adds flat vectors over the ranks of `carrier`; all ranks call it in the same order with the same lengths.

    `_data_ranks` are theirs, and `_rank` is this one's number among them; one that is alone needs no carrier, which has
    them under the same numbers unless `_carried` gives others. Of sequences that are cut into `chunks`, each chunk
    of a micro-batch is a leaf of its own (core/mesh.py).
    """

    _rank: int
    _data_ranks: Sequence[DataRank]
    _carrier: Carrier | None
    _carried: Sequence[int] = ()
    _chunks: int = 1

    def __post_init__(self) -> None:
        self._size = len(self._data_ranks)
        self.alone = self._size == 1  # there is no other rank to add with
        self._carried = self._carried or range(self._size)

    def of_holders(self, leaves: int) -> CanonicalSum:
        """Return what adds `leaves` leaves between those ranks alone that hold one. This one does."""
        holders = [rank for rank, each in enumerate(self._data_ranks) if each.own_blocks(leaves, self._chunks)]
        data_ranks = [self._data_ranks[rank] for rank in holders]
        carried = [self._carried[rank] for rank in holders]
        return CanonicalSum(holders.index(self._rank), data_ranks, self._carrier, carried, self._chunks)

    def __call__(self, pieces: Mapping[LeafBlock, Tensor], leaves: int, like: Tensor) -> Tensor:
        """Return the sum over all `leaves` leaves, on every rank.

        `pieces` are this rank's, flat, and may be overwritten; `like` is a flat tensor of the same length, dtype
        and device, for ranks that hold none.
        """
        if self.alone:
            return total(pieces, leaves, add_)
        held = [each.own_blocks(leaves, self._chunks) for each in self._data_ranks]
        if _halving_fits(held):
            (piece,) = pieces.values()
            return self._halve_and_double(piece)
        return self._exchange([pieces[block] for block in held[self._rank]], held, leaves, like)

    def of_ranks(self, own: Tensor) -> Tensor:
        """Return the sum of one flat vector of each rank, `own` of this one, on every rank: in the order of the ranks.

        As many leaves as replicas, one each: so the bits are the same each time, but those of one process they are not.
        """
        rank = self._data_ranks[self._rank]
        [block] = rank.own_blocks(rank.replicas)
        return self({block: own}, rank.replicas, own)

    def side_by_side(self, own: Tensor) -> Tensor:
        """Return the tensors of all ranks, which have one shape, by rank along a new dim 0. Nothing is added."""
        if self.alone:
            return own.unsqueeze(0)
        others = [rank for rank in range(self._size) if rank != self._rank]
        every = own.new_empty(self._size, *own.shape)
        every[self._rank] = own
        self._move([(every[self._rank], rank) for rank in others], [(every[rank], rank) for rank in others])
        return every

    def _halve_and_double(self, vector: Tensor) -> Tensor:
        owned = (0, len(vector))
        levels = []
        distance = 1
        # Down: at each level of the tree keep one half of what is owned, and add to it what the sibling has of it. Of
        # two floats a + b is b + a, so it does not matter which of the two is the left child.
        while distance < self._size:
            peer = self._rank ^ distance
            middle = sum(owned) // 2
            halves = (owned[0], middle), (middle, owned[1])
            kept, given = halves if not self._rank & distance else halves[::-1]
            received = torch.empty_like(vector[slice(*kept)])
            self._swap(vector[slice(*given)], received, peer)
            vector[slice(*kept)].add_(received)
            levels.append((peer, kept, given))
            owned = kept
            distance *= 2
        # Up: the halves are complete, and go back the way they came.
        for peer, kept, given in reversed(levels):
            self._swap(vector[slice(*kept)], vector[slice(*given)], peer)
        return vector

    def _swap(self, sent: Tensor, received: Tensor, peer: int) -> None:
        self._move([(sent, peer)], [(received, peer)])

    def _exchange(self, mine: list[Tensor], held: list[list[LeafBlock]], leaves: int, like: Tensor) -> Tensor:
        # Each rank adds one chunk: it needs that chunk of all pieces, and gives away the other chunks of its own.
        chunks = [slice(part.start, part.stop) for part in cut(len(like), self._size)]
        chunk = chunks[self._rank]
        others = [rank for rank in range(self._size) if rank != self._rank]
        arriving = {rank: [torch.empty_like(like[chunk]) for _ in held[rank]] for rank in others}
        self._move(
            [(piece[chunks[rank]], rank) for rank in others for piece in mine],
            [(piece, rank) for rank in others for piece in arriving[rank]],
        )
        # By their blocks the tree knows the brackets, whoever sent what, and in whatever order it came.
        arriving[self._rank] = [piece[chunk] for piece in mine]
        parts = {block: part for rank in arriving for block, part in zip(held[rank], arriving[rank], strict=True)}
        # The sum goes into memory that is there: of a piece of which all other chunks are sent.
        result = mine[0] if mine else torch.empty_like(like)
        result[chunk] = total(parts, leaves, add_)
        self._move([(result[chunk], rank) for rank in others], [(result[chunks[rank]], rank) for rank in others])
        return result

    def _move(self, sent: list[Addressed], received: list[Addressed]) -> None:
        assert self._carrier is not None
        move(
            self._carrier,
            [(tensor, self._carried[rank]) for tensor, rank in sent],
            [(tensor, self._carried[rank]) for tensor, rank in received],
        )


@final
class HalfPrecisionSum:
    """Adds flat vectors over ranks as CanonicalSum does, but for the rounding of what they send to `dtype`.

    16 bits are half the bytes of fp32, and no longer the bits of one process. torch's hooks of this kind
    (torch.distributed.algorithms.ddp_comm_hooks.default_hooks) leave the order of the sum to the backend; here a run on
    the same number of ranks has the same bits each time. A rank adds its own pieces in the dtype that they have,
    whatever their brackets: it sends one vector.
    """

    def __init__(self, across: CanonicalSum, dtype: torch.dtype) -> None:
        self._across = across
        self._dtype = dtype

    def __call__(self, pieces: Mapping[LeafBlock, Tensor], leaves: int, like: Tensor) -> Tensor:
        """Return the sum over all leaves, on every rank; see CanonicalSum."""
        if self._across.alone:
            return self._across(pieces, leaves, like)
        return self._across.of_ranks(own_sum(pieces, like).to(self._dtype)).to(like.dtype)


def all_to_all_rows(carrier: Carrier, member: int, members: int, vector: Tensor, holders: int) -> list[Tensor]:
    """Deal out the vectors of a round (core/mesh.py) among `members`: a reduce-scatter that does not add.

    Returns the part of this one, which is `member`, of the vectors of members 0 to `holders` - 1, in their order: fresh
    tensors. `vector` has one part of one length for each member, in their order; a rank that is no holder gives any.
    All members call it in the same order with vectors of the same length.
    """
    parts = vector.view(members, -1)
    others = [each for each in range(members) if each != member]
    arriving = {each: torch.empty_like(parts[0]) for each in others if each < holders}
    received = [(part, each) for each, part in arriving.items()]
    sent: list[Addressed] = []
    if member < holders:
        arriving[member] = parts[member].clone()
        sent = [(parts[each], each) for each in others]
    move(carrier, sent, received)
    return [arriving[each] for each in range(holders)]


def _halving_fits(held: list[list[LeafBlock]]) -> bool:
    size = len(held)
    return size & (size - 1) == 0 and all(len(h) == 1 and h[0].size == held[0][0].size for h in held)


def move(carrier: Carrier, sent: list[Addressed], received: list[Addressed]) -> None:
    """Exchange tensors, empty ones left out, so that the current stream may use them; a lost peer is named."""
    with translate_peer_errors():
        carrier([each for each in sent if each[0].numel()], [each for each in received if each[0].numel()]).wait()
