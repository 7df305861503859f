"""Tensors that are cut one way by some chunks, and another way by the same chunks: an exchange between all of them.

Each chunk cuts its tensor along one dim and gives every chunk a part; each joins what it gets along another dim. What
was whole in its heads and cut in its positions so becomes cut in its heads and whole in its positions, or back: [n, h,
l / c, d] to [n, h / c, l, d] for c chunks (Jacobs et al. 2023, "DeepSpeed Ulysses", arXiv 2309.14509, section 3.1). It
only moves elements, and its backward moves them back: nothing is added, so the bits do not depend on which chunks are
in one process.
"""

from collections.abc import Sequence
from functools import partial
from typing import final

import torch
from torch import Tensor

from lockstep.comm.canonical import move
from lockstep.comm.carrier import Carrier
from lockstep.parallel.linear_map import linear_map


@final
class Exchange:
    """Exchanges between `chunks` chunks, of which each of `ranks` ranks has as many, in order; this is `rank`.

    All ranks call it in the same order. One that is alone needs no carrier.
    """

    def __init__(self, chunks: int, rank: int = 0, ranks: int = 1, carrier: Carrier | None = None) -> None:
        self.chunks = chunks
        self._rank = rank
        self._ranks = ranks
        self._local_count = chunks // ranks
        self._carrier = carrier

    def __call__(self, inputs: Sequence[Sequence[Tensor]], cut: int, join: int) -> list[tuple[Tensor, ...]]:
        """Return what each of this rank's chunks gets, where `inputs` has what each gives: as many tensors."""
        forward, backward = partial(self.deal, cut=cut, join=join), partial(self.deal, cut=join, join=cut)
        parts = linear_map(forward, backward, [tensor for tensors in inputs for tensor in tensors])
        count = len(inputs[0])
        return [parts[first : first + count] for first in range(0, len(parts), count)]

    def deal(self, tensors: Sequence[Tensor], cut: int, join: int) -> list[Tensor]:
        """Return the tensors that this rank's chunks get, chunk by chunk, like `tensors`."""
        kinds = len(tensors) // self._local_count
        results = [self._join(tensors[kind::kinds], cut, join) for kind in range(kinds)]
        return [result[chunk] for chunk in range(self._local_count) for result in results]

    def _join(self, tensors: Sequence[Tensor], cut: int, join: int) -> list[Tensor]:
        """Return what each of this rank's chunks gets of one kind, where `tensors` has one tensor of each."""
        parts = [tensor.chunk(self.chunks, cut) for tensor in tensors]
        arrived = self._swap(parts)
        own_parts = [
            part for chunk_parts in parts for part in chunk_parts[self._first(self._rank) : self._first(self._rank + 1)]
        ]
        by_rank = [own_parts if rank == self._rank else [*arrived[rank]] for rank in range(self._ranks)]
        # Each joined tensor has memory of its own, and lies as it does where all chunks are in one process.
        return [
            torch.cat(
                [part for rank_parts in by_rank for part in rank_parts[chunk :: self._local_count]], join
            ).contiguous()
            for chunk in range(self._local_count)
        ]

    def _swap(self, parts: Sequence[Sequence[Tensor]]) -> dict[int, Tensor]:
        """Send each other rank the parts for its chunks, giver by giver, and return what each sends, in that order."""
        peers = [rank for rank in range(self._ranks) if rank != self._rank]
        sent = [
            (
                torch.stack(
                    [part for chunk_parts in parts for part in chunk_parts[self._first(rank) : self._first(rank + 1)]]
                ),
                rank,
            )
            for rank in peers
        ]
        arrived = {rank: torch.empty_like(tensor) for tensor, rank in sent}
        if self._carrier is not None:
            move(self._carrier, sent, [(tensor, rank) for rank, tensor in arrived.items()])
        return arrived

    def _first(self, rank: int) -> int:
        return rank * self._local_count
