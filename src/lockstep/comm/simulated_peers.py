"""A world in which this process is one of many ranks, and all other ranks are simulated. Nothing is sent.

The rank computes and stores the same amount of data as in a real run, and counts what it would send. Received tensors
contain zeros, or copies of the rank's own tensors. They arrive with the delay of a link of a given bandwidth, which
determines how much memory pending transfers hold. Use this world to measure memory, time and traffic. The results of
the computation are meaningless. Ranks whose behavior depends on received data, such as pipeline stages, can't be
simulated.
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

from lockstep.comm.carrier import AddressedTensor, Carrier, Transfer
from lockstep.comm.process_groups import ProcessGroups
from lockstep.comm.world import World
from lockstep.common.rank import RankInfo
from lockstep.core.batch import get_tensors


@dataclass(frozen=True)
class Delivery:
    """A simulated message, which arrives at the monotonic time `arrival_time`.

    Implements only those methods of dist.Work that are used.
    """

    arrival_time: float

    def wait(self) -> None:
        """Wait until the message has arrived."""
        time.sleep(max(0.0, self.arrival_time - time.monotonic()))

    def is_completed(self) -> bool:
        """Return whether the message has arrived."""
        return time.monotonic() >= self.arrival_time


@final
class Traffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the `num_messages` and `num_bytes` that this rank would send over a link of bandwidth `link_bytes_per_s`.

    If `mean_delay_factor` is set, the duration of each send is multiplied by a random number with this mean, and
    collectives don't block. Transfers then complete at different times in each step, as on a busy network.

    To count torch's collectives, use this object as a context manager. Collectives are counted as ring algorithms: in
    each of n - 1 rounds, each of the n ranks sends a part to its neighbor. The calling thread blocks, as with gloo.
    """

    def __init__(self, link_bytes_per_s: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.link_bytes_per_s = link_bytes_per_s
        self.mean_delay_factor = 0.0
        self._random = random.Random(0)
        self.num_messages = 0
        self.num_bytes = 0
        self._free_time = 0.0  # time at which the link is free
        self._lock = threading.Lock()

    def record_send(self, num_messages: int, num_bytes: int) -> Delivery:
        """Count `num_messages` messages of `num_bytes` bytes in total. They are sent after all earlier messages."""
        with self._lock:
            self.num_messages += num_messages
            self.num_bytes += num_bytes
            delay_factor = self.mean_delay_factor * self._random.expovariate(1.0) if self.mean_delay_factor else 1.0
            self._free_time = max(self._free_time, time.monotonic()) + delay_factor * num_bytes / self.link_bytes_per_s
            return Delivery(self._free_time)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count an operation if it is a collective, and run the operation."""
        name = str(func)
        if name.startswith("c10d."):
            # The largest argument has the full size. The other arguments have the size of a rank's part.
            total_bytes = max(sum(tensor.nbytes for tensor in get_tensors(argument)) for argument in args)
            [size] = [dist.ProcessGroup.unbox(argument).size() for argument in args if _is_process_group(argument)]
            rounds = 2 if "allreduce" in name else 1
            delivery = self.record_send(rounds * (size - 1), rounds * total_bytes * (size - 1) // size)
            if not self.mean_delay_factor:
                delivery.wait()
        return func(*args, **(kwargs or {}))

    def make_carrier(self, group: dist.ProcessGroup) -> Carrier:
        """Return a carrier that counts sent tensors and fills received tensors with zeros."""

        def start_transfer(sent: Sequence[AddressedTensor], received: Sequence[AddressedTensor]) -> Transfer:
            delivery = self.record_send(len(sent), sum(tensor.nbytes for tensor, _ in sent))
            for tensor, _ in received:
                tensor.zero_()
            return Transfer([delivery], [tensor for tensor, _ in sent], [])  # type: ignore[list-item]

        return start_transfer


def _is_process_group(value: Any) -> bool:
    return isinstance(value, torch.ScriptObject) and value._type().name() == "ProcessGroup"  # type: ignore[attr-defined]


@contextmanager
def simulate_world(
    rank: int, size: int, device: torch.device, link_bytes_per_s: float
) -> Iterator[tuple[World, Traffic]]:
    """Yield a world in which this process is rank `rank` of `size`, and the Traffic of this rank.

    `link_bytes_per_s` is the bandwidth of the simulated link in bytes per second.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # lazy import: registers the backend "fake"

    traffic, timeout = Traffic(link_bytes_per_s), timedelta(minutes=1)  # collectives never reach this timeout
    info = RankInfo(rank, size, rank, size, "plan")
    if size == 1:
        yield World(info, device), traffic
        return
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size, timeout=timeout)
    main, side = dist.group.WORLD, dist.new_group(timeout=timeout)
    assert isinstance(main, dist.ProcessGroup)
    assert isinstance(side, dist.ProcessGroup)
    world = World(info, device, ProcessGroups(main, side, timeout, traffic.make_carrier))
    try:
        yield world, traffic
    finally:
        world.close()
