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
        self._own = chunks // ranks
        self._carrier = carrier

    def __call__(self, given: Sequence[Sequence[Tensor]], cut: int, join: int) -> list[tuple[Tensor, ...]]:
        """Return what each of this rank's chunks gets, where `given` has what each gives: as many tensors."""
        there, back = partial(self.deal, cut=cut, join=join), partial(self.deal, cut=join, join=cut)
        parts = linear_map(there, back, [tensor for tensors in given for tensor in tensors])
        count = len(given[0])
        return [parts[first : first + count] for first in range(0, len(parts), count)]

    def deal(self, given: Sequence[Tensor], cut: int, join: int) -> list[Tensor]:
        """Return the tensors that this rank's chunks get, chunk by chunk, as they are `given`."""
        kinds = len(given) // self._own
        results = [self._join(given[kind::kinds], cut, join) for kind in range(kinds)]
        return [result[chunk] for chunk in range(self._own) for result in results]

    def _join(self, given: Sequence[Tensor], cut: int, join: int) -> list[Tensor]:
        """Return what each of this rank's chunks gets of one kind, where `given` has one tensor of each."""
        parts = [tensor.chunk(self.chunks, cut) for tensor in given]
        arriving = self._swap(parts)
        own = [part for each in parts for part in each[self._first(self._rank) : self._first(self._rank + 1)]]
        by_rank = [own if rank == self._rank else [*arriving[rank]] for rank in range(self._ranks)]
        # Each joined tensor has memory of its own, and lies as it does where all chunks are in one process.
        return [
            torch.cat([part for of_rank in by_rank for part in of_rank[chunk :: self._own]], join).contiguous()
            for chunk in range(self._own)
        ]

    def _swap(self, parts: Sequence[Sequence[Tensor]]) -> dict[int, Tensor]:
        """Send each other rank the parts for its chunks, giver by giver, and return what each sends, in that order."""
        others = [rank for rank in range(self._ranks) if rank != self._rank]
        sent = [
            (torch.stack([part for each in parts for part in each[self._first(rank) : self._first(rank + 1)]]), rank)
            for rank in others
        ]
        arriving = {rank: torch.empty_like(tensor) for tensor, rank in sent}
        if self._carrier is not None:
            move(self._carrier, sent, [(tensor, rank) for rank, tensor in arriving.items()])
        return arriving

    def _first(self, rank: int) -> int:
        return rank * self._own
