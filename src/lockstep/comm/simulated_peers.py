"""A world in which this process is one of many ranks and the others are pretended: nothing is sent.

What a rank computes, holds and sends is then that of a real run, on one process and on any number of ranks; what it
receives is zeros, or its own, and comes when it would by a link of a given speed: how much memory waits for exchanges
follows from that. So memory, time and traffic can be measured, and no result means anything. Ranks that decide by what
others send, as those of pipelines do, cannot be pretended.
"""

import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.comm.carrier import Addressed, Carrier, Transfer
from lockstep.comm.process_groups import ProcessGroups
from lockstep.comm.world import World
from lockstep.common.rank import RankInfo
from lockstep.core.batch import tensors_of


@dataclass(frozen=True)
class Delivery:
    """A message under way until `due`, of the monotonic clock: what Transfer asks of torch's Work."""

    due: float

    def wait(self) -> None:
        """Wait until it has come."""
        time.sleep(max(0.0, self.due - time.monotonic()))

    def is_completed(self) -> bool:
        """Whether it has come."""
        return time.monotonic() >= self.due


@final
class Traffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What this rank would have sent: `messages`, and their `bytes`, by a `link` of so many bytes a second.

    With `late` what is sent from rank to rank takes so many times as long in the mean, now more and now less, and no
    collective waits for it: exchanges then end at other times in each step, as they do on a busy network.

    Collectives of torch's, seen while it is entered as a context, count as a ring does them: in each round, one
    fewer than the group has ranks, a rank sends a part to its neighbour. The calling thread waits for them, as it does
    for gloo's.
    """

    def __init__(self, link: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.link = link
        self.late = 0.0
        self._random = random.Random(0)
        self.messages = 0
        self.bytes = 0
        self._free = 0.0  # when the link has sent what it was given
        self._lock = threading.Lock()

    def send(self, messages: int, size: int) -> Delivery:
        """Count messages of `size` bytes together, which go once those before them have gone."""
        with self._lock:
            self.messages += messages
            self.bytes += size
            times = self.late * self._random.expovariate(1.0) if self.late else 1.0
            self._free = max(self._free, time.monotonic()) + times * size / self.link
            return Delivery(self._free)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count a collective, and do what is asked."""
        name = str(func)
        if name.startswith("c10d."):
            whole = max(sum(tensor.nbytes for tensor in tensors_of(each)) for each in args)  # not the part of one rank
            [size] = [dist.ProcessGroup.unbox(each).size() for each in args if _is_group(each)]
            rounds = 2 if "allreduce" in name else 1
            delivery = self.send(rounds * (size - 1), rounds * whole * (size - 1) // size)
            if not self.late:
                delivery.wait()
        return func(*args, **(kwargs or {}))

    def carry(self, group: dist.ProcessGroup) -> Carrier:
        """Return a carrier that counts what it is given, and brings zeros."""

        def start(sent: Sequence[Addressed], received: Sequence[Addressed]) -> Transfer:
            delivery = self.send(len(sent), sum(tensor.nbytes for tensor, _ in sent))
            for tensor, _ in received:
                tensor.zero_()
            return Transfer([delivery], [tensor for tensor, _ in sent], [])  # type: ignore[list-item]

        return start


def _is_group(value: Any) -> bool:
    return isinstance(value, torch.ScriptObject) and value._type().name() == "ProcessGroup"  # type: ignore[attr-defined]


@contextmanager
def pretended_world(rank: int, size: int, device: torch.device, link: float) -> Iterator[tuple[World, Traffic]]:
    """Yield a world in which this process is `rank` among `size`, and its traffic by a `link` of bytes a second."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # here, because it registers the backend "fake"

    traffic, timeout = Traffic(link), timedelta(minutes=1)  # of exchanges that take no time
    info = RankInfo(rank, size, rank, size, "plan")
    if size == 1:
        yield World(info, device), traffic
        return
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size, timeout=timeout)
    first, second = dist.group.WORLD, dist.new_group(timeout=timeout)
    assert isinstance(first, dist.ProcessGroup)
    assert isinstance(second, dist.ProcessGroup)
    world = World(info, device, ProcessGroups(first, second, timeout, traffic.carry))
    try:
        yield world, traffic
    finally:
        world.close()
