"""The canonical tree between processes: the same brackets as in one process, over the network.

Rank r of W holds the pieces of the r-th contiguous cut of the leaves (core/tree.py). Two ways lead to the same sum:

*Halving and doubling*, where every rank holds one block and all blocks are of one size (W and M/W powers of two):
level by level, rank r and its sibling r XOR 2^k swap halves of what they still own and add; then the way back without
adding. Each rank sends 2 (W-1)/W of the vector, what a ring all-reduce sends.

*Direct exchange* otherwise: the vector is cut into W chunks, each rank sends all its pieces of chunk j to rank j, which
adds them by the tree and sends the sum to all. Ranks may hold no piece (fewer micro-batches than processes) or several.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.core.order import cut
from lockstep.core.tree import Block, blocks, total
from lockstep.runtime.peers import naming_lost_peers


def add_(left: Tensor, right: Tensor) -> Tensor:
    """Add in the memory of `left`."""
    return left.add_(right)


class CanonicalSum:
    """Adds flat vectors over the ranks of `group`; all ranks call it in the same order with the same lengths."""

    def __init__(self, rank: int, size: int, group: dist.ProcessGroup | None) -> None:
        self._rank = rank
        self._size = size
        self._group = group

    def __call__(self, pieces: Mapping[Block, Tensor], leaves: int, like: Tensor) -> Tensor:
        """Return the sum over all `leaves` leaves, on every rank.

        `pieces` are this rank's, flat, and may be overwritten; `like` is a flat tensor of the same length, dtype
        and device, for ranks that hold none.
        """
        if self._size == 1:
            return total(pieces, leaves, add_)
        held = [blocks(share) for share in cut(leaves, self._size)]
        with naming_lost_peers():
            if _halving_fits(held):
                (piece,) = pieces.values()
                return self._halve_and_double(piece)
            return self._exchange([pieces[block] for block in held[self._rank]], held, leaves, like)

    def _halve_and_double(self, vector: Tensor) -> Tensor:
        owned = (0, len(vector))
        levels = []
        distance = 1
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
        for peer, kept, given in reversed(levels):
            self._swap(vector[slice(*kept)], vector[slice(*given)], peer)
        return vector

    def _swap(self, sent: Tensor, received: Tensor, peer: int) -> None:
        self._run([dist.P2POp(dist.irecv, received, peer, self._group)] if len(received) else [], sent, [peer])

    def _exchange(self, mine: list[Tensor], held: list[list[Block]], leaves: int, like: Tensor) -> Tensor:
        chunks = [slice(part.start, part.stop) for part in cut(len(like), self._size)]
        chunk = chunks[self._rank]
        others = [rank for rank in range(self._size) if rank != self._rank]
        arriving = {rank: [torch.empty_like(like[chunk]) for _ in held[rank]] for rank in others}
        operations = [
            dist.P2POp(dist.irecv, piece, rank, self._group)
            for rank in others
            for piece in arriving[rank]
            if len(piece)
        ]
        operations += [
            dist.P2POp(dist.isend, piece[chunks[rank]], rank, self._group)
            for rank in others
            for piece in mine
            if len(piece[chunks[rank]])
        ]
        _wait(operations)
        arriving[self._rank] = [piece[chunk] for piece in mine]
        parts = {block: part for rank in arriving for block, part in zip(held[rank], arriving[rank], strict=True)}
        result = mine[0] if mine else torch.empty_like(like)
        result[chunk] = total(parts, leaves, add_)
        arrivals = [
            dist.P2POp(dist.irecv, result[chunks[rank]], rank, self._group)
            for rank in others
            if len(result[chunks[rank]])
        ]
        self._run(arrivals, result[chunk], others)
        return result

    def _run(self, operations: list[dist.P2POp], sent: Tensor, peers: list[int]) -> None:
        if len(sent):
            operations += [dist.P2POp(dist.isend, sent, peer, self._group) for peer in peers]
        _wait(operations)


def _halving_fits(held: list[list[Block]]) -> bool:
    size = len(held)
    return size & (size - 1) == 0 and all(len(h) == 1 and h[0].size == held[0][0].size for h in held)


def _wait(operations: list[dist.P2POp]) -> None:
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()
