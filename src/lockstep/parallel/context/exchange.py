"""All-to-all between sequence chunks, which changes the dim along which tensors are split.

Each chunk splits its tensor along the dim `cut` and sends one part to every chunk. It then concatenates the received
parts along the dim `join`. For example, with c chunks a tensor of shape [n, h, l / c, d] becomes a tensor of shape
[n, h / c, l, d]. The first tensor has all heads and some positions, and the second tensor has some heads and all
positions. The reverse exchange swaps the dims (Jacobs et al. 2023, "DeepSpeed Ulysses", arXiv 2309.14509, section 3.1).

An exchange only moves elements, and its backward pass moves the gradients back. Nothing is added, so the result has the
same bits regardless of how the chunks are distributed over processes.
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
    """Exchanges tensors between all chunks of a sequence.

    The chunks are distributed in order over the ranks, with the same number of chunks on each rank. All ranks must
    make the same calls in the same order.

    - `chunks`: The number of chunks over all ranks, a multiple of `ranks`.
    - `rank`, `ranks`: The index of this rank, and the number of ranks.
    - `carrier`: Sends tensors to the other ranks. A single rank doesn't need a carrier.
    """

    def __init__(self, chunks: int, rank: int = 0, ranks: int = 1, carrier: Carrier | None = None) -> None:
        self.chunks = chunks
        self._rank = rank
        self._ranks = ranks
        self._local_count = chunks // ranks
        self._carrier = carrier

    def __call__(self, inputs: Sequence[Sequence[Tensor]], cut: int, join: int) -> list[tuple[Tensor, ...]]:
        """Exchange the tensors of all chunks, and return the exchanged tensors of each local chunk.

        `inputs` are the tensors of each local chunk. All chunks have the same number of tensors. Each tensor is split
        along the dim `cut`, and the received parts are concatenated along the dim `join`.
        """
        forward, backward = partial(self.deal, cut=cut, join=join), partial(self.deal, cut=join, join=cut)
        parts = linear_map(forward, backward, [tensor for tensors in inputs for tensor in tensors])
        count = len(inputs[0])
        return [parts[first : first + count] for first in range(0, len(parts), count)]

    def deal(self, tensors: Sequence[Tensor], cut: int, join: int) -> list[Tensor]:
        """Exchange tensors without autograd.

        `tensors` is the flat list of the tensors of the first local chunk, then of the second, and so on. The result
        has the same order.
        """
        kinds = len(tensors) // self._local_count
        results = [self._join(tensors[kind::kinds], cut, join) for kind in range(kinds)]
        return [result[chunk] for chunk in range(self._local_count) for result in results]

    def _join(self, tensors: Sequence[Tensor], cut: int, join: int) -> list[Tensor]:
        """Exchange one tensor per local chunk, for example the queries, and return the results in the same order."""
        parts = [tensor.chunk(self.chunks, cut) for tensor in tensors]
        arrived = self._swap(parts)
        local_parts = [
            part for chunk_parts in parts for part in chunk_parts[self._first(self._rank) : self._first(self._rank + 1)]
        ]
        by_rank = [local_parts if rank == self._rank else [*arrived[rank]] for rank in range(self._ranks)]
        # The result is contiguous and never a view, so that its layout does not depend on the number of processes.
        return [
            torch.cat(
                [part for rank_parts in by_rank for part in rank_parts[chunk :: self._local_count]], join
            ).contiguous()
            for chunk in range(self._local_count)
        ]

    def _swap(self, parts: Sequence[Sequence[Tensor]]) -> dict[int, Tensor]:
        """Send every other rank the parts for its chunks, in the order of this rank's chunks.

        Returns the received parts by sender rank, stacked along dim 0.
        """
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
