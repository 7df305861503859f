"""The processes of a run and what they say to each other: the only place that starts torch.distributed.

Gradients travel by the canonical tree (runtime/canonical.py) in a group of their own, so that a side lane may
use it while this thread talks in the other group. Everything else here is small and exact whatever its order.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lockstep.core.devices import device_number, shared
from lockstep.core.mesh import Place
from lockstep.core.rank import RankInfo
from lockstep.errors import UsageError
from lockstep.runtime import ports
from lockstep.runtime.canonical import CanonicalSum
from lockstep.runtime.lane import InlineLane, Lane, StreamLane, ThreadLane
from lockstep.runtime.meeting import Meeting
from lockstep.runtime.peers import naming_lost_peers
from lockstep.runtime.precision import fix_workspace


@dataclass(frozen=True)
class Grid:
    """The ranks as replicas of some members each: `mesh` has the members of this rank's replica, for fully_shard.

    The groups are for a side lane: `within` the replica, and `across` the ranks that are the same member as this one.
    """

    mesh: DeviceMesh
    within: dist.ProcessGroup
    across: dist.ProcessGroup | None


@final
class World:
    """This process among all processes of the run. In a world of one nothing is sent."""

    def __init__(
        self,
        info: RankInfo,
        device: torch.device,
        groups: tuple[dist.ProcessGroup, ...] = (),
        timeout: timedelta | None = None,
    ) -> None:
        self.rank = info.rank
        self.size = info.size
        self.local_rank = info.local_rank
        self.local_size = info.local_size
        self.host = socket.gethostname()
        self.device = device
        self._groups = groups
        self._timeout = timeout
        self._stop = _StopAgreement(groups[0]) if groups else None
        self._grids: dict[int, Grid] = {}

    def canonical(self, places: Sequence[Place]) -> CanonicalSum:
        """Return the tree between the ranks, which stand at `places`."""
        return CanonicalSum(self.rank, places, self._groups[1] if self._groups else None)

    @property
    def on_gpu(self) -> bool:
        """Whether this rank computes on a CUDA device."""
        return self.device.type == "cuda"

    def grid(self, members: int) -> Grid:
        """Return the ranks as replicas of `members` consecutive ranks. All ranks call it; groups are made once."""
        if members not in self._grids:
            self._grids[members] = self._new_grid(members)
        return self._grids[members]

    def _new_grid(self, members: int) -> Grid:
        shape = (self.size // members, members)
        if shape[0] == 1:
            return Grid(init_device_mesh(self.device.type, (members,)), self._groups[1], None)
        mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=("replica", "member"))
        ranks = torch.arange(self.size).view(shape)
        within = self._own_group(ranks.tolist())
        across = self._own_group(ranks.T.tolist())
        return Grid(mesh["member"], within, across)

    def _own_group(self, groups: list[list[int]]) -> dist.ProcessGroup:
        """Make a group of each of these lists of ranks, as all ranks must, and return the one with this rank in it."""
        made = [(ranks, dist.new_group(ranks, timeout=self._timeout)) for ranks in groups]
        [own] = [group for ranks, group in made if self.rank in ranks]
        assert isinstance(own, dist.ProcessGroup)
        return own

    def lane(self) -> Lane:
        """Return a second lane for communication; close it after use."""
        if self.size == 1:
            return InlineLane()
        return StreamLane(self.device) if self.device.type == "cuda" else ThreadLane()

    def generators(self) -> list[torch.Generator]:
        """Return the generators that random operations of a model draw from: the CPU's and the device's."""
        if self.device.type == "cuda":
            return [torch.default_generator, torch.cuda.default_generators[self.device.index or 0]]
        return [torch.default_generator]

    def add_(self, tensor: Tensor) -> Tensor:
        """Add a tensor over the ranks, in place, in any order: for whole numbers and for disjoint entries.

        One of a CUDA device is added there, and this process does not wait for it.
        """
        if self.size > 1:
            with naming_lost_peers():
                dist.all_reduce(tensor, group=self._groups[0])
        return tensor

    def spread(self, own: Sequence[Tensor], others: Mapping[int, Sequence[Tensor]]) -> None:
        """Send `own` to each other rank and fill `others`, by rank, with what that one sends.

        All ranks call it with as many tensors, and a rank's have the same sizes everywhere. They are contiguous.
        """
        first = self._groups[0] if self._groups else None
        operations = [
            dist.P2POp(dist.irecv, tensor, group=first, group_peer=rank)
            for rank, tensors in others.items()
            for tensor in tensors
            if tensor.numel()
        ]
        operations += [
            dist.P2POp(dist.isend, tensor, group=first, group_peer=rank)
            for rank in others
            for tensor in own
            if tensor.numel()
        ]
        with naming_lost_peers():
            for work in dist.batch_isend_irecv(operations) if operations else ():
                work.wait()

    def agree_to_stop(self, wish: int) -> int:
        """Return the largest wish that any rank had at its last call (0: none), the same on all ranks.

        The wishes of this call are exchanged while the next step computes.
        """
        if self._stop is None:
            return wish
        with naming_lost_peers():
            return self._stop.exchange(wish)

    def compare(self, facts: dict[str, Any]) -> None:
        """Raise UsageError that names the ranks whose `facts` are not those of rank 0. All ranks call it."""
        if self.size == 1:
            return
        texts = [json.dumps(value, sort_keys=True).encode() for value in facts.values()]
        table = self.gather(b"".join(hashlib.sha256(text).digest() for text in texts))
        for number, name in enumerate(facts):
            found = [row[32 * number : 32 * (number + 1)] for row in table]
            others = [rank for rank in range(self.size) if found[rank] != found[0]]
            if others:
                raise UsageError(
                    f"{name}: rank {', '.join(map(str, others))} differs from rank 0; start all ranks with the same"
                )

    def gather(self, own: bytes) -> list[bytes]:
        """Return what each rank gives, by rank: bytes of one length on all. All ranks call it."""
        table = torch.zeros(self.size, len(own), dtype=torch.uint8)
        table[self.rank] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        return [row.numpy().tobytes() for row in self.add_(table)]

    def tell(self, text: str) -> str:
        """Return rank 0's `text` on every rank."""
        if self.size == 1:
            return text
        data = text.encode() if self.rank == 0 else b""
        length = int(self.add_(torch.tensor([len(data)])))
        message = torch.zeros(length, dtype=torch.uint8)
        if data:
            message.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return bytes(self.add_(message).tolist()).decode()

    def all_tell(self, text: str) -> list[str]:
        """Return the `text` of each rank, by rank, on every rank."""
        own = text.encode()
        lengths = [int.from_bytes(each) for each in self.gather(len(own).to_bytes(8))]
        padded = self.gather(own.ljust(max(1, *lengths)))
        return [row[:length].decode() for row, length in zip(padded, lengths, strict=True)]

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.add_(torch.zeros(1))

    def beside(self) -> World:
        """Return the same ranks in a group of their own, for another thread. All ranks call it; nobody closes it."""
        return self.among([list(range(self.size))])

    def among(self, groups: list[list[int]]) -> World:
        """Return those ranks that stand in one of `groups` with this one, as a world of their own.

        Each rank is in one group. All ranks call it; nobody closes it.
        """
        [ranks] = [ranks for ranks in groups if self.rank in ranks]
        info = RankInfo(ranks.index(self.rank), len(ranks), self.local_rank, self.local_size, "part")
        if all(len(each) == 1 for each in groups):
            return World(info, self.device)
        group = self._own_group(groups)
        return World(info, self.device, (group, group), self._timeout)

    def close(self) -> None:
        """Leave the process group."""
        if self._groups:
            if self._stop is not None:
                self._stop.close()
            dist.destroy_process_group()


def open_world(meeting: Meeting, device: torch.device) -> World:
    """Make a process group of the ranks that have met and return their world. All of them call it."""
    info = meeting.info
    if meeting.store is None:
        return World(info, device)
    if info.local_size == info.size and len(set(meeting.hosts)) == 1:
        _stay_on_this_host(info.launcher == "lockstep")
    timeout = timedelta(seconds=meeting.timeout_s)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    with naming_lost_peers():
        own = dist.PrefixStore("group", meeting.store.unsigned)  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=own, rank=info.rank, world_size=info.size, timeout=timeout)
        first, second = dist.group.WORLD, dist.new_group(timeout=timeout)
    assert isinstance(first, dist.ProcessGroup)
    assert isinstance(second, dist.ProcessGroup)
    world = World(info, device, (first, second), timeout)
    if world.on_gpu:
        _check_devices(world)
    return world


def choose_device(device: Literal["auto", "cpu", "cuda"], info: RankInfo) -> torch.device:
    """Return this rank's device, or raise UsageError where it is not there."""
    count = torch.cuda.device_count()
    if device == "cpu" or (device == "auto" and not count):
        return torch.device("cpu")
    if not count:
        raise UsageError("placement.device: cuda asked for, but torch finds no CUDA device here; use cpu or auto")
    number = device_number(count, info.local_rank, info.local_size, hidden="CUDA_VISIBLE_DEVICES" in os.environ)
    fix_workspace()
    chosen = torch.device("cuda", number)
    torch.cuda.set_device(chosen)
    return chosen


@final
class _StopAgreement:
    """An all-reduce of one number that is always one step behind, so that nobody waits for it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._sent = torch.zeros(1, dtype=torch.int64)
        self._work: dist.Work | None = None

    def exchange(self, wish: int) -> int:
        agreed = self.close()
        self._sent.fill_(wish)
        self._work = dist.all_reduce(self._sent, dist.ReduceOp.MAX, self._group, async_op=True)
        return agreed

    def close(self) -> int:
        if self._work is None:
            return 0
        self._work.wait()
        self._work = None
        return int(self._sent)


def _stay_on_this_host(own: bool) -> None:
    """Let gloo and NCCL listen at the loopback interface: no rank is elsewhere.

    Variables of the user's decide, but not in a run of Lockstep's `own`, where they can only be meant for others.
    """
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ[name] = ports.loopback() if own else os.environ.get(name, ports.loopback())


def _check_devices(world: World) -> None:
    """Raise UsageError on all ranks where some have one device between them, which NCCL would not say so plainly."""
    name = hashlib.sha256(str(torch.cuda.get_device_properties(world.device).uuid).encode()).digest()
    table = torch.zeros(world.size, len(name), dtype=torch.uint8)
    table[world.rank] = torch.frombuffer(bytearray(name), dtype=torch.uint8)
    world.add_(table)
    for ranks in shared({rank: bytes(row.tolist()).hex() for rank, row in enumerate(table)}):
        raise UsageError(
            f"placement.device: ranks {', '.join(map(str, ranks))} have one CUDA device between them; let the "
            f"launcher show each process one of its own (srun --gpus-per-task=1), or start fewer on this host"
        )
