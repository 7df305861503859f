"""Tensors that are cut one way by some seats, and another way by the same seats: an exchange between all of them.

Each seat cuts its tensor along one dim and gives every seat a part; each joins what it gets along another dim. So what
was whole in its heads and cut in its positions becomes cut in its heads and whole in its positions, or back (Jacobs et
al. 2023, "DeepSpeed Ulysses", arXiv 2309.14509, section 3.1). It only moves elements, and its backward moves them back:
nothing is added, so the bits do not depend on which seats are in one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import final

import torch
from torch import Tensor

from lockstep.comm.canonical import move
from lockstep.comm.carrier import Carrier
from lockstep.comm.peer_errors import translated_peer_errors
from lockstep.parallel.linear_map import linear_map


@final
class Exchange:
    """Exchanges between `seats` seats, of which each of `ranks` ranks has as many, in order; this is `rank`.

    All ranks call it in the same order. One that is alone needs no carrier.
    """

    def __init__(self, seats: int, rank: int = 0, ranks: int = 1, carrier: Carrier | None = None) -> None:
        self.seats = seats
        self._rank = rank
        self._ranks = ranks
        self._own = seats // ranks
        self._carrier = carrier

    def __call__(self, given: Sequence[Sequence[Tensor]], cut: int, join: int) -> list[tuple[Tensor, ...]]:
        """Return what each of this rank's seats gets, where `given` has what each gives: as many tensors."""
        there, back = partial(self.moved, cut=cut, join=join), partial(self.moved, cut=join, join=cut)
        moved = linear_map(there, back, [tensor for tensors in given for tensor in tensors])
        count = len(given[0])
        return [moved[first : first + count] for first in range(0, len(moved), count)]

    def moved(self, given: Sequence[Tensor], cut: int, join: int) -> list[Tensor]:
        """Return the tensors that this rank's seats get, seat by seat, as they are `given`."""
        kinds = len(given) // self._own
        results = [self._joined(given[kind::kinds], cut, join) for kind in range(kinds)]
        return [result[seat] for seat in range(self._own) for result in results]

    def _joined(self, given: Sequence[Tensor], cut: int, join: int) -> list[Tensor]:
        """Return what each of this rank's seats gets of one kind, where `given` has one tensor of each."""
        parts = [tensor.chunk(self.seats, cut) for tensor in given]
        arriving = self._exchanged(parts)
        own = [part for each in parts for part in each[self._first(self._rank) : self._first(self._rank + 1)]]
        by_rank = [own if rank == self._rank else [*arriving[rank]] for rank in range(self._ranks)]
        # Each joined tensor has memory of its own, and lies as it does where all seats are in one process.
        return [
            torch.cat([part for of_rank in by_rank for part in of_rank[seat :: self._own]], join).contiguous()
            for seat in range(self._own)
        ]

    def _exchanged(self, parts: Sequence[Sequence[Tensor]]) -> dict[int, Tensor]:
        """Send each other rank the parts for its seats, giver by giver, and return what each sends, in that order."""
        others = [rank for rank in range(self._ranks) if rank != self._rank]
        sent = [
            (torch.stack([part for each in parts for part in each[self._first(rank) : self._first(rank + 1)]]), rank)
            for rank in others
        ]
        arriving = {rank: torch.empty_like(tensor) for tensor, rank in sent}
        if self._carrier is not None:
            with translated_peer_errors():
                move(self._carrier, sent, [(tensor, rank) for rank, tensor in arriving.items()])
        return arriving

    def _first(self, rank: int) -> int:
        return rank * self._own
