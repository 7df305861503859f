"""The reduction tree across processes: an all-reduce with the same order of additions as in a single process.

Each rank starts with zero or more *pieces*: the partial sums of its micro-batches (core/tree.py).

1. At each level of the reduction tree, the ranks split the vector into smaller parts, and each rank adds its parts
   (core/reduction.py).
2. At the root, each of W ranks holds one of W parts of the sum.
3. The ranks all-gather the parts in log2(W) rounds.

With one piece per rank, each rank sends about the same amount of data as in a ring all-reduce.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple, Protocol, final

import torch
from torch import Tensor

from lockstep.comm.carrier import AddressedTensor, Carrier, renumber_ranks
from lockstep.comm.peer_errors import translate_peer_errors
from lockstep.core.mesh import DataRank
from lockstep.core.reduction import BlockMove, Reduction, Shares, plan_reduction
from lockstep.core.tree import LeafBlock, sum_pieces


def add_(left: Tensor, right: Tensor) -> Tensor:
    """Add `right` to `left` in place."""
    return left.add_(right)


class VectorSum(Protocol):
    """The protocol of functions that sum a flat vector over ranks, such as CanonicalSum."""

    def __call__(self, pieces: Mapping[LeafBlock, Tensor], num_leaves: int, like: Tensor, /) -> Tensor: ...


def add_pieces(pieces: Mapping[LeafBlock, Tensor], like: Tensor) -> Tensor:
    """Add a rank's pieces in place, from left to right, and return the sum. Returns zeros if there are no pieces."""
    if not pieces:
        return torch.zeros_like(like)
    first, *rest = (pieces[block] for block in sorted(pieces))
    for piece in rest:
        add_(first, piece)
    return first


@final
@dataclass(eq=False)
class CanonicalSum:
    """Sums flat vectors over ranks. All ranks must call it in the same order with vectors of the same length.

    `_data_ranks` contains the data rank of each rank, and `_rank` is the index of this rank, both in the rank order of
    `_carrier`. A single rank needs no carrier. If sequences are split into `_num_chunks` chunks, each chunk of a
    micro-batch is a separate leaf of the reduction tree (core/mesh.py).
    """

    _rank: int
    _data_ranks: Sequence[DataRank]
    _carrier: Carrier | None
    _num_chunks: int = 1

    def __post_init__(self) -> None:
        self._size = len(self._data_ranks)
        self.is_single_rank = self._size == 1
        self._rank_shares = Shares(tuple(range(self._size)))
        self._schedules: dict[int, Reduction] = {}  # by number of leaves
        self._holder_sums: dict[int, CanonicalSum] = {}

    def restrict_to_holders(self, num_leaves: int) -> CanonicalSum:
        """Return a CanonicalSum over the ranks that hold any of the leaves. This rank must be one of them."""
        if num_leaves not in self._holder_sums:
            holders = [
                rank
                for rank, data_rank in enumerate(self._data_ranks)
                if data_rank.get_own_blocks(num_leaves, self._num_chunks)
            ]
            carrier = self._carrier and renumber_ranks(self._carrier, holders)
            data_ranks = [self._data_ranks[rank] for rank in holders]
            self._holder_sums[num_leaves] = CanonicalSum(
                holders.index(self._rank), data_ranks, carrier, self._num_chunks
            )
        return self._holder_sums[num_leaves]

    def __call__(self, pieces: Mapping[LeafBlock, Tensor], num_leaves: int, like: Tensor) -> Tensor:
        """Return the sum over all leaves of the reduction tree, on all ranks.

        `pieces` are this rank's partial sums as flat vectors, and may be overwritten. `like` is a flat tensor of the
        same length, dtype and device, for ranks without pieces.
        """
        if self.is_single_rank:
            return sum_pieces(pieces, num_leaves, add_)
        rounds, shares = self._get_schedule(num_leaves)
        blocks = self._data_ranks[self._rank].get_own_blocks(num_leaves, self._num_chunks)
        values = {block.first: _Share(range(len(like)), pieces[block], is_received=False) for block in blocks}
        for sums, moves in rounds:
            for left, right, _ in sums:
                # Prefer to add in place to a share that wasn't received. Swapping the operands doesn't change the bits,
                # because floating-point addition is commutative.
                accumulator, addend = sorted((values.pop(left), values.pop(right)), key=attrgetter("is_received"))
                values[left] = accumulator._replace(tensor=add_(accumulator.tensor, addend.tensor))
            self._reshard(moves, values, like)
        # All pieces of this rank have been sent or added, so their memory can be reused.
        result = pieces[blocks[0]] if blocks else torch.empty_like(like)
        part, share, _ = values[0]
        result[part.start : part.stop].copy_(share)
        self._gather(result, shares)
        return result

    def sum_over_ranks(self, vector: Tensor) -> Tensor:
        """All-reduce a flat vector. The order of the additions is fixed by a reduction tree with one leaf per replica.

        The result has the same bits in every run on the same number of ranks, but not the bits of a single process.
        """
        rank = self._data_ranks[self._rank]
        [block] = rank.get_own_blocks(rank.num_replicas)
        return self({block: vector}, rank.num_replicas, vector)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """All-gather a tensor of the same shape on all ranks. Stacks the results along a new dim 0 in rank order."""
        if self.is_single_rank:
            return tensor.unsqueeze(0)
        gathered = tensor.new_empty(self._size, *tensor.shape)
        gathered[self._rank] = tensor
        self._gather(gathered.view(-1), self._rank_shares)
        return gathered

    def _get_schedule(self, num_leaves: int) -> Reduction:
        """Return this rank's part of the reduction schedule."""
        if num_leaves not in self._schedules:
            blocks = [data_rank.get_own_blocks(num_leaves, self._num_chunks) for data_rank in self._data_ranks]
            self._schedules[num_leaves] = plan_reduction(blocks, num_leaves).for_rank(self._rank)
        return self._schedules[num_leaves]

    def _reshard(self, moves: list[BlockMove], values: dict[int, _Share], like: Tensor) -> None:
        """Send this rank's shares to the ranks that add them next, and receive the shares that this rank adds."""
        sent: list[AddressedTensor] = []
        received: list[AddressedTensor] = []
        for move in moves:
            held = values.pop(move.block, None)
            if held is not None:
                sent += [(held.view(part), rank) for rank, part in move.get_sent_parts(self._rank, len(like))]
            if self._rank not in move.target.positions:
                continue
            target = move.target.get_part(self._rank, len(like))
            sources = move.get_received_parts(self._rank, len(like))
            if held is not None and all(rank == self._rank for rank, _ in sources):
                values[move.block] = held.narrow(target)
                continue
            values[move.block] = share = _Share(target, like.new_empty(len(target)), is_received=True)
            for rank, part in sources:
                if held is not None and rank == self._rank:
                    share.view(part).copy_(held.view(part))
                else:
                    received.append((share.view(part), rank))
        self._transfer_tensors(sent, received)

    def _gather(self, vector: Tensor, shares: Shares) -> None:
        """All-gather the shares of all ranks into `vector`."""
        for sent, received in shares.iterate_gather_rounds(self._rank, len(vector)):
            self._transfer_tensors(
                *(
                    [(vector[part.start : part.stop], rank) for rank, part in transfers]
                    for transfers in (sent, received)
                )
            )

    def _transfer_tensors(self, sent: list[AddressedTensor], received: list[AddressedTensor]) -> None:
        assert self._carrier is not None
        transfer_tensors(self._carrier, sent, received)


@final
class HalfPrecisionSum:
    """Sums flat vectors over ranks like CanonicalSum, but rounds them to `dtype` before sending.

    Each rank first adds its pieces in their own dtype, and then sends a single vector. With a 16-bit dtype, ranks send
    half as much data as in fp32. The bits differ from those of a single process, but all runs on the same number of
    ranks have the same bits. torch's similar hooks (torch.distributed.algorithms.ddp_comm_hooks) leave the order of the
    additions to the backend.
    """

    def __init__(self, canonical_sum: CanonicalSum, dtype: torch.dtype) -> None:
        self._canonical_sum = canonical_sum
        self._dtype = dtype

    def __call__(self, pieces: Mapping[LeafBlock, Tensor], num_leaves: int, like: Tensor) -> Tensor:
        """Return the sum over all leaves of the reduction tree, on all ranks. See CanonicalSum."""
        if self._canonical_sum.is_single_rank:
            return self._canonical_sum(pieces, num_leaves, like)
        return self._canonical_sum.sum_over_ranks(add_pieces(pieces, like).to(self._dtype)).to(like.dtype)


def all_to_all_parts(
    carrier: Carrier, member_index: int, num_members: int, vector: Tensor, num_senders: int
) -> list[Tensor]:
    """Exchange the vectors of a round (core/mesh.py): a reduce-scatter without the reduction.

    `vector` is the concatenation of one part for each of the `num_members` members, all of the same length. Returns, as
    new tensors, the parts for member `member_index` in the vectors of members 0 to `num_senders` - 1. The vectors of
    members with a higher index aren't used. All members must call this function in the same order with vectors of the
    same length.
    """
    parts = vector.view(num_members, -1)
    peers = [peer for peer in range(num_members) if peer != member_index]
    parts_by_sender = {peer: torch.empty_like(parts[0]) for peer in peers if peer < num_senders}
    received = [(part, peer) for peer, part in parts_by_sender.items()]
    sent: list[AddressedTensor] = []
    if member_index < num_senders:
        parts_by_sender[member_index] = parts[member_index].clone()
        sent = [(parts[peer], peer) for peer in peers]
    transfer_tensors(carrier, sent, received)
    return [parts_by_sender[peer] for peer in range(num_senders)]


class _Share(NamedTuple):
    """A rank's share of the sum of a block: the range `element_range` of the vector, as a tensor.

    `is_received` is True if the tensor was received from a different rank, into separate memory.
    """

    element_range: range
    tensor: Tensor
    is_received: bool

    def view(self, element_range: range) -> Tensor:
        """Return a view of the elements in the range `element_range` of the full vector."""
        return self.tensor[
            element_range.start - self.element_range.start : element_range.stop - self.element_range.start
        ]

    def narrow(self, element_range: range) -> _Share:
        """Return a share with only the elements in the range `element_range` of the full vector."""
        return self._replace(element_range=element_range, tensor=self.view(element_range))


def transfer_tensors(carrier: Carrier, sent: list[AddressedTensor], received: list[AddressedTensor]) -> None:
    """Send and receive the non-empty tensors, and make the current stream wait for them.

    Raises PeerLostError if a peer is lost.
    """
    with translate_peer_errors():
        carrier(
            [transfer for transfer in sent if transfer[0].numel()],
            [transfer for transfer in received if transfer[0].numel()],
        ).wait()
