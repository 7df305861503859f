"""All-to-all between sequence chunks, which changes the dim along which tensors are split.

Each chunk splits its tensor along `split_dim`, and sends one piece to every chunk. It then concatenates the received
pieces along `concat_dim`. For example, with c chunks, the shape changes from [n, h, l / c, d] to [n, h / c, l, d]: the
input has all heads and some positions, and the result has some heads and all positions. The reverse exchange swaps the
dims (Jacobs et al. 2023, "DeepSpeed Ulysses", arXiv 2309.14509, section 3.1).

An exchange only moves elements, and its backward pass moves the gradients back. Nothing is added, so the result has the
same bits regardless of how the chunks are distributed over processes.
"""

from collections.abc import Sequence
from functools import partial
from typing import final

import torch
from torch import Tensor

from lockstep.comm.canonical import transfer_tensors
from lockstep.comm.carrier import Carrier
from lockstep.parallel.linear_map import apply_linear_map


@final
class Exchange:
    """Exchanges tensors between all chunks of a sequence.

    The chunks are distributed in order over the ranks, with the same number of chunks on each rank. All ranks must
    make the same calls in the same order.

    - `num_chunks`: The number of chunks over all ranks. Must be a multiple of `num_ranks`.
    - `rank`, `num_ranks`: The index of this rank, and the number of ranks.
    - `carrier`: Sends tensors between ranks. Not needed for a single rank.
    """

    def __init__(self, num_chunks: int, rank: int = 0, num_ranks: int = 1, carrier: Carrier | None = None) -> None:
        self.chunks = num_chunks
        self._rank = rank
        self._ranks = num_ranks
        self._local_count = num_chunks // num_ranks
        self._carrier = carrier

    def __call__(self, inputs: Sequence[Sequence[Tensor]], split_dim: int, concat_dim: int) -> list[tuple[Tensor, ...]]:
        """Exchange the tensors of all chunks, and return the exchanged tensors of each local chunk.

        `inputs` contains the tensors of each local chunk. All chunks must have the same number of tensors. Each tensor
        is split along `split_dim`, and the received pieces are concatenated along `concat_dim`.
        """
        forward, backward = (
            partial(self.exchange_flat, split_dim=split_dim, concat_dim=concat_dim),
            partial(self.exchange_flat, split_dim=concat_dim, concat_dim=split_dim),
        )
        results = apply_linear_map(forward, backward, [tensor for tensors in inputs for tensor in tensors])
        count = len(inputs[0])
        return [results[first : first + count] for first in range(0, len(results), count)]

    def exchange_flat(self, tensors: Sequence[Tensor], split_dim: int, concat_dim: int) -> list[Tensor]:
        """Exchange a flat list of tensors, without autograd.

        `tensors` contains all tensors of the first local chunk, then all tensors of the second local chunk, and so on.
        The result has the same order.
        """
        tensors_per_chunk = len(tensors) // self._local_count
        results = [
            self._exchange_one_per_chunk(tensors[index::tensors_per_chunk], split_dim, concat_dim)
            for index in range(tensors_per_chunk)
        ]
        return [result[chunk] for chunk in range(self._local_count) for result in results]

    def _exchange_one_per_chunk(self, tensors: Sequence[Tensor], split_dim: int, concat_dim: int) -> list[Tensor]:
        """Exchange one tensor of each local chunk, for example the queries. Returns one tensor for each local chunk."""
        pieces = [tensor.chunk(self.chunks, split_dim) for tensor in tensors]
        received = self._exchange_with_peers(pieces)
        local_pieces = [
            piece
            for chunk_pieces in pieces
            for piece in chunk_pieces[self._first_chunk(self._rank) : self._first_chunk(self._rank + 1)]
        ]
        pieces_by_rank = [local_pieces if rank == self._rank else [*received[rank]] for rank in range(self._ranks)]
        # The results are contiguous and never views, so their memory layout doesn't depend on the number of processes.
        return [
            torch.cat(
                [piece for rank_pieces in pieces_by_rank for piece in rank_pieces[chunk :: self._local_count]],
                concat_dim,
            ).contiguous()
            for chunk in range(self._local_count)
        ]

    def _exchange_with_peers(self, pieces: Sequence[Sequence[Tensor]]) -> dict[int, Tensor]:
        """Send each peer the pieces for its chunks. Returns the received pieces by peer rank, stacked along dim 0."""
        peers = [rank for rank in range(self._ranks) if rank != self._rank]
        sent = [
            (
                torch.stack(
                    [
                        piece
                        for chunk_pieces in pieces
                        for piece in chunk_pieces[self._first_chunk(rank) : self._first_chunk(rank + 1)]
                    ]
                ),
                rank,
            )
            for rank in peers
        ]
        received = {rank: torch.empty_like(tensor) for tensor, rank in sent}
        if self._carrier is not None:
            transfer_tensors(self._carrier, sent, [(tensor, rank) for rank, tensor in received.items()])
        return received

    def _first_chunk(self, rank: int) -> int:
        return rank * self._local_count
