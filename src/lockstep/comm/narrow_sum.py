"""A sum over ranks that is sent, and added, in 16 bits: half the bytes of fp32, and no longer the bits of one process.

torch's hooks of this kind (torch.distributed.algorithms.ddp_comm_hooks.default_hooks) leave the order of the sum to the
backend. Here it is the tree of comm/canonical.py over the ranks' numbers, so on the same number of ranks a run has the
same bits each time, interrupted or not, whatever carries it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor

from lockstep.comm.canonical import CanonicalSum, own_sum
from lockstep.core.mesh import DataRank
from lockstep.core.tree import Block


@final
class NarrowSum:
    """Adds flat vectors over ranks as CanonicalSum does, but for the rounding of what they send to `dtype`.

    A rank adds its own pieces in the dtype that they have, whatever their brackets: it sends one vector.
    """

    def __init__(self, across: CanonicalSum, rank: DataRank, dtype: torch.dtype) -> None:
        self._across = across
        self._rank = rank
        self._dtype = dtype

    def __call__(self, pieces: Mapping[Block, Tensor], leaves: int, like: Tensor) -> Tensor:
        """Return the sum over all leaves, on every rank; see CanonicalSum."""
        if self._across.alone:
            return self._across(pieces, leaves, like)
        # As many leaves as ranks, one each: a rank without a micro-batch has zeros, which change no sum.
        [own] = self._rank.held(self._rank.replicas)
        narrow = own_sum(pieces, like).to(self._dtype)
        return self._across({own: narrow}, self._rank.replicas, narrow).to(like.dtype)
