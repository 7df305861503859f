"""Carriers move tensors between ranks: directly through the backend, or staged through host memory.

The choice is made once, from the backend and the device (comm/world.py). NCCL takes CUDA tensors, and gloo takes CPU
tensors. The send and recv of gloo pass on the address of a tensor without checking its device (torch,
ProcessGroupGloo::send). The all-gather of gloo, which fully_shard uses, copies CUDA tensors to pinned memory and back
by itself. Carriers never add, so the bits don't depend on the carrier.
"""

from collections.abc import Callable, Sequence
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.device.memory import host_like

Addressed = tuple[Tensor, int]  # a contiguous tensor, and the group rank of the peer


@final
class Transfer:
    """A transfer that has started. It keeps sent tensors alive, and copies staged tensors to the device on arrival."""

    def __init__(
        self, works: Sequence[dist.Work], sent_tensors: Sequence[Tensor], landing: Sequence[tuple[Tensor, Tensor]]
    ):
        self._works = works
        self._kept = sent_tensors
        self._landing = landing
        self.landed: Callable[[], None] | None = None  # called when all tensors have arrived

    def wait(self) -> None:
        """Wait until work on the current stream can read the received tensors and write to the sent tensors.

        With gloo, the calling thread waits. With NCCL, only the stream waits.
        """
        for work in self._works:
            work.wait()
        for tensor, host in self._landing:
            tensor.copy_(host, non_blocking=True)
        if self.landed is not None:
            self.landed()

    def is_done(self) -> bool:
        """Return whether the transfer is known to be complete, so that its memory can be freed."""
        return not self._landing and all(work.is_completed() for work in self._works)


# Sends and receives tensors point to point between the ranks of a group. It takes the tensors to send, and those to
# receive into. The transfer starts once the current stream reaches this point. Between two ranks, tensors arrive in the
# order in which they were sent. Within a call, sends and receives never wait for each other.
Carrier = Callable[[Sequence[Addressed], Sequence[Addressed]], Transfer]


def direct(group: dist.ProcessGroup) -> Carrier:
    """Return a carrier that passes tensors to the backend as they are: CUDA tensors to NCCL, CPU tensors to gloo."""
    return lambda sent, received: Transfer(_start(group, sent, received), [tensor for tensor, _ in sent], [])


def staged(group: dist.ProcessGroup) -> Carrier:
    """Return a carrier that moves tensors through host memory, for gloo with several ranks on a device.

    It is slow, because the calling thread waits for the copies.
    """

    def start(sent: Sequence[Addressed], received: Sequence[Addressed]) -> Transfer:
        staged_sends = [(host_like(tensor).copy_(tensor, non_blocking=True), peer) for tensor, peer in sent]
        for device in {tensor.device for tensor, _ in sent if tensor.device.type == "cuda"}:
            # The copies run on the current stream, after the kernels that compute the tensors. gloo must read only
            # after they are done.
            torch.cuda.current_stream(device).synchronize()
        staged_receives = [(host_like(tensor), peer) for tensor, peer in received]
        landing = [(tensor, host) for (tensor, _), (host, _) in zip(received, staged_receives, strict=True)]
        return Transfer(_start(group, staged_sends, staged_receives), [host for host, _ in staged_sends], landing)

    return start


def renumbered(carrier: Carrier, numbers: Sequence[int]) -> Carrier:
    """Return the same carrier with different rank numbers: rank i of the result is rank `numbers[i]` of `carrier`."""
    return lambda sent, received: carrier(
        [(tensor, numbers[peer]) for tensor, peer in sent], [(tensor, numbers[peer]) for tensor, peer in received]
    )


def _start(group: dist.ProcessGroup, sent: Sequence[Addressed], received: Sequence[Addressed]) -> list[dist.Work]:
    operations = [dist.P2POp(dist.irecv, tensor, group=group, group_peer=peer) for tensor, peer in received]
    operations += [dist.P2POp(dist.isend, tensor, group=group, group_peer=peer) for tensor, peer in sent]
    return dist.batch_isend_irecv(operations) if operations else []
