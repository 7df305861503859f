"""How tensors travel from rank to rank: as the backend takes them, or by way of the host's memory.

Which of the two is chosen once, from the backend and the device (comm/world.py); nobody else asks. NCCL takes
tensors of a CUDA device, gloo those of the host: its send and recv pass the address of a tensor on as it is, which
nothing checks (torch, ProcessGroupGloo::send). Its all-gather, which fully_shard uses, copies a CUDA tensor to pinned
memory and back by itself. Nothing here adds, so the bits do not depend on what carries them.
"""

from collections.abc import Callable, Sequence
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.device.memory import host_like

Addressed = tuple[Tensor, int]  # a contiguous tensor, and the number of the other rank in the group


@final
class Transfer:
    """An exchange under way. It keeps what it sends alive, and lands what came by way of the host."""

    def __init__(self, works: Sequence[dist.Work], kept: Sequence[Tensor], landing: Sequence[tuple[Tensor, Tensor]]):
        self._works = works
        self._kept = kept
        self._landing = landing
        self.landed: Callable[[], None] | None = None  # called when all has come

    def wait(self) -> None:
        """Wait until what was received may be read, and what was sent written to, by what the current stream does next.

        Of gloo the calling thread waits, of NCCL the stream alone.
        """
        for work in self._works:
            work.wait()
        for tensor, host in self._landing:
            tensor.copy_(host, non_blocking=True)
        if self.landed is not None:
            self.landed()

    def is_done(self) -> bool:
        """Whether all of it is known to be done, so that memory may go."""
        return not self._landing and all(work.is_completed() for work in self._works)


# Exchanges tensors between the ranks of one group, point to point: given those to send, and those to receive into, it
# begins to once the current stream has come to here. Between two ranks tensors arrive in the order in which they were
# sent. What one call sends and receives never waits for one another.
Carrier = Callable[[Sequence[Addressed], Sequence[Addressed]], Transfer]


def direct(group: dist.ProcessGroup) -> Carrier:
    """Return what gives tensors to the backend as they are: NCCL those of CUDA, gloo those of the CPU."""
    return lambda sent, received: Transfer(_start(group, sent, received), [tensor for tensor, _ in sent], [])


def staged(group: dist.ProcessGroup) -> Carrier:
    """Return what moves tensors by way of the host's memory, which gloo can read: for several ranks on one device.

    The calling thread waits for the copies, so this is no way to be fast.
    """

    def start(sent: Sequence[Addressed], received: Sequence[Addressed]) -> Transfer:
        leaving = [(host_like(tensor).copy_(tensor, non_blocking=True), peer) for tensor, peer in sent]
        for device in {tensor.device for tensor, _ in sent if tensor.device.type == "cuda"}:
            # The copies run on the current stream, behind what computes the tensors; gloo reads when they are done.
            torch.cuda.current_stream(device).synchronize()
        arriving = [(host_like(tensor), peer) for tensor, peer in received]
        landing = [(tensor, host) for (tensor, _), (host, _) in zip(received, arriving, strict=True)]
        return Transfer(_start(group, leaving, arriving), [host for host, _ in leaving], landing)

    return start


def renumbered(carrier: Carrier, numbers: Sequence[int]) -> Carrier:
    """Return the same carrier for a caller that calls rank `numbers[i]` of it i."""
    return lambda sent, received: carrier(
        [(tensor, numbers[peer]) for tensor, peer in sent], [(tensor, numbers[peer]) for tensor, peer in received]
    )


def _start(group: dist.ProcessGroup, sent: Sequence[Addressed], received: Sequence[Addressed]) -> list[dist.Work]:
    operations = [dist.P2POp(dist.irecv, tensor, group=group, group_peer=peer) for tensor, peer in received]
    operations += [dist.P2POp(dist.isend, tensor, group=group, group_peer=peer) for tensor, peer in sent]
    return dist.batch_isend_irecv(operations) if operations else []
