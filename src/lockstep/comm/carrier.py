"""Carriers transfer tensors between ranks, either directly through the backend or staged through host memory.

comm/world.py selects the carrier by backend and device. NCCL transfers CUDA tensors, and gloo transfers CPU tensors.
CUDA tensors must be staged for gloo, because its send and recv read the address of a tensor without checking its device
(torch, ProcessGroupGloo::send). gloo's all-gather, which fully_shard uses, stages CUDA tensors by itself. Carriers
never add, so the bits don't depend on the carrier.
"""

from collections.abc import Callable, Sequence
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.device.memory import empty_host_tensor

AddressedTensor = tuple[Tensor, int]  # a contiguous tensor, and the group rank of the peer


@final
class Transfer:
    """A pending transfer. Keeps the sent tensors alive until it is released."""

    def __init__(
        self,
        works: Sequence[dist.Work],
        sent_tensors: Sequence[Tensor],
        staged_receives: Sequence[tuple[Tensor, Tensor]],
    ):
        self._works = works
        self._sent_tensors = sent_tensors
        self._staged_receives = staged_receives
        self.on_arrival: Callable[[], None] | None = None  # called when all tensors have arrived

    def wait(self) -> None:
        """Wait until the current stream can read the received tensors and overwrite the sent tensors.

        With gloo, the calling thread blocks. With NCCL, only the stream waits.
        """
        for work in self._works:
            work.wait()
        for tensor, host in self._staged_receives:
            tensor.copy_(host, non_blocking=True)
        if self.on_arrival is not None:
            self.on_arrival()

    def is_done(self) -> bool:
        """Return whether the transfer is complete, so that its memory can be freed. Doesn't block.

        Returns False for transfers that receive staged tensors.
        """
        return not self._staged_receives and all(work.is_completed() for work in self._works)


# Starts point-to-point transfers between the ranks of a group. The arguments are the tensors to send and the tensors to
# receive into. The transfers start once the current stream reaches this point. Between two ranks, tensors arrive in the
# order in which they were sent. Within a call, sends and receives never block each other.
Carrier = Callable[[Sequence[AddressedTensor], Sequence[AddressedTensor]], Transfer]


def make_direct_carrier(group: dist.ProcessGroup) -> Carrier:
    """Return a carrier that passes tensors to the backend without copies: CUDA tensors to NCCL, CPU tensors to gloo."""
    return lambda sent, received: Transfer(_start_transfers(group, sent, received), [tensor for tensor, _ in sent], [])


def make_staged_carrier(group: dist.ProcessGroup) -> Carrier:
    """Return a carrier that stages CUDA tensors in host memory, for gloo with several ranks on a device.

    This is slow, because the calling thread waits for the copies.
    """

    def start_transfer(sent: Sequence[AddressedTensor], received: Sequence[AddressedTensor]) -> Transfer:
        host_sends = [(empty_host_tensor(tensor).copy_(tensor, non_blocking=True), peer) for tensor, peer in sent]
        for device in {tensor.device for tensor, _ in sent if tensor.device.type == "cuda"}:
            # The copies run on the current stream, after the kernels that compute the tensors. gloo reads the copies as
            # soon as the transfer starts.
            torch.cuda.current_stream(device).synchronize()
        host_receives = [(empty_host_tensor(tensor), peer) for tensor, peer in received]
        staged_receives = [(tensor, host) for (tensor, _), (host, _) in zip(received, host_receives, strict=True)]
        return Transfer(
            _start_transfers(group, host_sends, host_receives), [host for host, _ in host_sends], staged_receives
        )

    return start_transfer


def renumber_ranks(carrier: Carrier, ranks: Sequence[int]) -> Carrier:
    """Return `carrier` with its ranks renumbered: rank i of the result is rank `ranks[i]` of `carrier`."""
    return lambda sent, received: carrier(
        [(tensor, ranks[peer]) for tensor, peer in sent], [(tensor, ranks[peer]) for tensor, peer in received]
    )


def _start_transfers(
    group: dist.ProcessGroup, tensors_to_send: Sequence[AddressedTensor], receive_buffers: Sequence[AddressedTensor]
) -> list[dist.Work]:
    operations = [dist.P2POp(dist.irecv, tensor, group=group, group_peer=peer) for tensor, peer in receive_buffers]
    operations += [dist.P2POp(dist.isend, tensor, group=group, group_peer=peer) for tensor, peer in tensors_to_send]
    return dist.batch_isend_irecv(operations) if operations else []
