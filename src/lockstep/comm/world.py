"""The processes of a run and the small collectives between them. Only this module starts torch.distributed.

Gradients are summed in the order of the reduction tree (comm/canonical.py), and in a separate process group, so that a
side stream and this thread can communicate at the same time (comm/process_groups.py). Carriers transfer tensors on
the device (comm/carrier.py). All other communication is small, on the CPU, and exact in any order.
docs/how-a-step-runs.md lists all communication.
"""

import hashlib
import json
import math
import os
import socket
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import InitVar, dataclass, field, replace
from datetime import timedelta
from typing import Any, Final, Literal, Protocol, Self, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lockstep.comm.canonical import CanonicalSum, transfer_tensors
from lockstep.comm.carrier import Carrier, make_direct_carrier, make_staged_carrier, renumber_ranks
from lockstep.comm.edges import Edge, Edges
from lockstep.comm.message_log import MessageLog
from lockstep.comm.peer_errors import translate_peer_errors
from lockstep.comm.process_groups import ProcessGroups
from lockstep.comm.step_agreement import StepAgreement
from lockstep.comm.stream import CommStream, CudaStream, InlineStream, ThreadStream
from lockstep.common.differences import describe_differences
from lockstep.common.plainfile import parse_json
from lockstep.common.rank import RankInfo
from lockstep.core import random
from lockstep.core.devices import (
    SHARING,
    Backend,
    check_cuda,
    choose_device_index,
    find_shared_devices,
    resolve_backend,
)
from lockstep.core.mesh import Axis, Mesh
from lockstep.device import ports
from lockstep.device.precision import set_cublas_workspace
from lockstep.errors import UsageError

# If a rank is lost, the heartbeat (ranks/heartbeat.py) stops the other ranks within seconds and reports the reason. By
# default, torch would abort the process as soon as NCCL detects the broken connection, before the reason is known.
# Collectives that exceed placement.timeout_s still abort the process (the second variable is new in torch 2.15).
_NCCL_ENV: Final = {"TORCH_NCCL_RETHROW_CUDA_ERRORS": "0", "TORCH_NCCL_TEARDOWN_ON_TIMEOUT": "1"}
# The store's counter of `without_timeout` blocks that ranks have left.
_ARRIVALS_KEY: Final = "arrived"
_POLL_PAUSES_S: Final = 0.002, 0.2  # the shortest and the longest pause between two polls of the counter


@final
@dataclass(eq=False)
class World:
    """This process and all other processes of the run. A world of size 1 doesn't communicate."""

    info: InitVar[RankInfo]
    device: torch.device
    _groups: ProcessGroups | None = None
    _store: Any = None
    # Groups of ranks that share a device.
    device_sharing_groups: list[list[int]] = field(default_factory=list, init=False)
    _store_count: int = field(default=0, init=False)
    _untimed_count: int = field(default=0, init=False)  # number of `without_timeout` blocks entered

    def __post_init__(self, info: RankInfo) -> None:
        self.rank = info.rank
        self.size = info.size
        self.local_rank = info.local_rank
        self.local_size = info.local_size
        self.host = socket.gethostname()
        groups = self._groups
        self._agreement = StepAgreement(groups.main, self.rank, self.size) if groups is not None else None
        self._edges = Edges(groups, self.rank, self.size, self.device) if groups is not None else None

    def make_canonical_sum(
        self, mesh: Mesh, *axes: Axis, side_stream: bool = True, num_chunks: int = 1
    ) -> CanonicalSum:
        """Return a CanonicalSum over the ranks of `mesh` that differ from this rank only along these axes.

        If `side_stream` is set, call the sum on a side stream. Otherwise, call it on this thread. `num_chunks` is the
        number of chunks that sequences are split into. All ranks must call this method with the same arguments.
        """
        data_ranks, order = mesh.get_data_ranks_along(*axes)
        ranks = self._find_own_group(mesh.get_groups(*axes))
        carrier = (
            renumber_ranks(self.make_carrier(mesh, *axes, side_stream=side_stream), order) if len(order) > 1 else None
        )
        return CanonicalSum(order.index(ranks.index(self.rank)), data_ranks, carrier, num_chunks)

    def make_carrier(self, mesh: Mesh, *axes: Axis, side_stream: bool = True) -> Carrier:
        """Return a carrier between the ranks that differ from this rank only along these axes.

        See `make_canonical_sum`.
        """
        assert self._groups is not None
        rank_groups = mesh.get_groups(*axes)
        ranks = self._find_own_group(rank_groups)
        return self._groups.make_group_carrier(
            self._groups.get_subgroup(rank_groups, ranks, side_stream), ranks, f"along {', '.join(axes)}"
        )

    def make_device_mesh(self, mesh: Mesh, *axes: Axis) -> DeviceMesh:
        """Return a DeviceMesh of the ranks that differ from this rank only along these axes. Use it on this thread."""
        assert self._groups is not None
        rank_groups = mesh.get_groups(*axes)
        group = self._groups.get_subgroup(rank_groups, self._find_own_group(rank_groups), side_stream=False)
        # from_group uses the existing group. If all groups use gloo, torch would otherwise create an NCCL group.
        return DeviceMesh.from_group(group, self.device.type)

    def make_store(self, purpose: str) -> Any:
        """Return a store with its own key prefix, for a single purpose.

        Ranks that share the store must make the same calls of this method in the same order.
        """
        assert self._store is not None
        self._store_count += 1
        return dist.PrefixStore(f"{purpose} {self._store_count}", self._store)  # type: ignore[attr-defined]

    @property
    def backend(self) -> Literal["nccl", "gloo"]:
        """The backend that transfers tensors on the device between ranks."""
        return self._groups.backend if self._groups is not None else "gloo"

    @property
    def timeout_s(self) -> float:
        """The timeout of a collective, in seconds."""
        timeout = self._groups.timeout if self._groups is not None else None
        return timeout.total_seconds() if timeout is not None else math.inf

    @property
    def on_gpu(self) -> bool:
        """Whether this rank computes on a CUDA device."""
        return self.device.type == "cuda"

    def connect(self, neighbors: Collection[int]) -> dict[int, Edge]:
        """Return the edge to each rank in `neighbors`. All ranks must call this. Neighbors must list each other."""
        return self._edges.connect(neighbors) if self._edges is not None else {}

    def to_torch_rank(self, rank: int) -> int:
        """Convert a rank of this world to a rank of torch.distributed."""
        return self._groups.to_torch_rank(rank) if self._groups is not None else rank

    def _find_own_group(self, rank_groups: list[list[int]]) -> list[int]:
        """Return the entry of `rank_groups` that contains this rank."""
        [ranks] = [ranks for ranks in rank_groups if self.rank in ranks]
        return ranks

    def rotate_shard_groups(self, mesh: Mesh, distance: int, message_log: MessageLog) -> Self:
        """Return a world of the same processes, with the ranks rotated between the shard groups.

        Each shard group takes the ranks of the shard group `distance` positions later, wrapping around. The order
        within a shard group stays the same. `message_log` records the messages of the new world. Don't close the
        returned world.
        """
        numbers, shards = [*range(self.size)], mesh.get_groups("shard")
        for index, members in enumerate(shards):
            for member, new_rank in zip(members, shards[(index + distance) % len(shards)], strict=True):
                numbers[new_rank] = self.to_torch_rank(member)
        info = RankInfo(
            numbers.index(self.to_torch_rank(self.rank)), self.size, self.local_rank, self.local_size, "part"
        )
        groups = None if self._groups is None else replace(self._groups, torch_ranks=numbers, log=message_log)
        return replace(self, info=info, _groups=groups)

    def make_stream(self) -> CommStream:
        """Return a side stream for communication. Close it after use."""
        if self.size == 1:
            return InlineStream()
        return CudaStream(self.device) if self.device.type == "cuda" else ThreadStream()

    def get_generators(self) -> list[torch.Generator]:
        """Return the default generators that a model draws from: the CPU generator, and on CUDA, the device's."""
        if self.device.type == "cuda":
            return [torch.default_generator, torch.cuda.default_generators[self.device.index or 0]]
        return [torch.default_generator]

    def set_device(self, device: torch.device) -> None:
        """Compute on `device` from now on. For processes that use different devices for different micro-batches."""
        self.device = device
        if device.type == "cuda":
            torch.cuda.set_device(device)

    def seed(self, key: int) -> None:
        """Seed all generators of this rank with a key from core/random.py."""
        seed = random.make_torch_seed(key)
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.default_generators[self.device.index or 0].manual_seed(seed)

    def add_(self, tensor: Tensor) -> Tensor:
        """All-reduce a tensor in place, and return it.

        The order of the additions isn't fixed. Therefore only use this method for integers, or if each element is
        nonzero on at most one rank. CUDA tensors are summed on their device, without blocking this process.
        """
        if self.size == 1:
            return tensor
        assert self._groups is not None
        return self._groups.add_(tensor)

    def exchange_all(self, local: Sequence[Tensor], remote: Mapping[int, Sequence[Tensor]]) -> None:
        """All-gather the tensors `local`. Receives the tensors of every other rank into `remote`, by rank.

        All ranks must call this method with the same number of contiguous tensors. Their sizes can differ between
        ranks, so the tensors in `remote` must have the sizes of the tensors that the sending rank passes as `local`.
        """
        sent = [(tensor, rank) for rank in remote for tensor in local]
        received = [(tensor, rank) for rank, tensors in remote.items() for tensor in tensors]
        self.exchange(sent, received)

    def exchange(self, sent: Sequence[tuple[Tensor, int]], received: Sequence[tuple[Tensor, int]]) -> None:
        """Send tensors to ranks, and receive tensors from ranks. `sent` and `received` contain (tensor, rank) pairs.

        All ranks must call this method. The tensors must be contiguous. Between two ranks, tensors arrive in the order
        in which they are sent.
        """
        if self._groups is not None:
            transfer_tensors(
                self._groups.make_group_carrier(self._groups.main, range(self.size), "rows"), [*sent], [*received]
            )

    def agree_on_stop_level(self, level: int) -> int:
        """Return the highest stop level that any rank passed in the previous call. 0 means not to stop.

        The levels of this call are exchanged in the background during the next step. All ranks must call this method.
        """
        if self._agreement is None:
            return level
        with translate_peer_errors():
            self._complete_agreement(self._agreement)
            return self._agreement.exchange(level)

    def set_compared_values(self, values: dict[str, Any], call_site: str = "") -> None:
        """Set values that must be the same on all ranks. `call_site` is the line of user code that set them, if any.

        `agree_on_stop_level` compares these values. If they differ, the next call of `agree_on_stop_level` or
        `compare_positions` raises UsageError.
        """
        if self._agreement is not None:
            self._agreement.compared_values, self._agreement.call_site = values, call_site

    def add_metrics(self, metrics: dict[str, float]) -> None:
        """Add metrics that `agree_on_stop_level` and `compare_positions` compare across ranks."""
        if self._agreement is not None:
            self._agreement.metrics.update(metrics)

    @property
    def metrics_differ(self) -> bool:
        """Whether ranks reported different metrics in the last completed comparison.

        The comparison of a step completes one step later. The value is identical on all ranks.
        """
        return self._agreement is not None and self._agreement.metrics_differ

    def compare_positions(self, position: int) -> tuple[int, int] | None:
        """Wait for all ranks, and check that they are at the same position in the program.

        Returns the position and rank of one of the ranks at a different position, or None if all positions are equal.
        Positions are numbered from 1. A rank that calls `agree_on_stop_level` instead is at position 0.
        """
        if self._agreement is None:
            return None
        with translate_peer_errors():
            self._complete_agreement(self._agreement)
            return self._agreement.compare_positions(position)

    def _complete_agreement(self, agreement: StepAgreement) -> None:
        if not agreement.finish_check():
            self.compare(
                agreement.last_values,
                "compute it from step.number, step.epoch and step.samples_seen, not from the rank",
                agreement.last_call_site,
            )

    def compare(
        self, values: dict[str, Any], advice: str = "start all ranks with the same value", call_site: str = ""
    ) -> None:
        """Raise UsageError if values differ between ranks. All ranks must call this method."""
        if self.size == 1:
            return
        values_by_rank = dict(enumerate(self.all_gather_json(values)))
        if lines := describe_differences(values_by_rank, [], advice, call_site):
            raise UsageError(lines[0])

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """All-gather bytes, and return them in rank order. All ranks must call this with bytes of the same length."""
        table = torch.zeros(self.size, len(data), dtype=torch.uint8)
        table[self.rank] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return [row.numpy().tobytes() for row in self.add_(table)]

    def broadcast_text(self, text: str) -> str:
        """Broadcast the `text` of rank 0, and return it. All ranks must call this method."""
        return self.all_gather_text(text)[0]

    def all_gather_text(self, text: str) -> list[str]:
        """All-gather a string, and return the strings in rank order. All ranks must call this method."""
        if self.size == 1:
            return [text]
        encoded = text.encode()
        lengths = [int.from_bytes(length) for length in self.all_gather_bytes(len(encoded).to_bytes(8))]
        padded = self.all_gather_bytes(encoded.ljust(max(1, *lengths)))
        return [row[:length].decode() for row, length in zip(padded, lengths, strict=True)]

    def all_gather_json(self, value: Any) -> list[Any]:
        """All-gather a JSON value, and return the values in rank order. All ranks must call this method."""
        return [parse_json(text) for text in self.all_gather_text(json.dumps(value))]

    def barrier(self) -> None:
        """Block until all ranks call this method."""
        self.add_(torch.zeros(1))

    @contextmanager
    def without_timeout(self) -> Iterator[None]:
        """Wait for all ranks at the end of the `with` block, without a timeout. All ranks must enter the block.

        A collective would time out if a rank spends a long time in the block. This method waits on the store instead,
        as long as all ranks send heartbeats. A rank whose block raises an exception doesn't wait, and no rank waits for
        it.
        """
        self._untimed_count += 1
        try:
            yield
        finally:
            with translate_peer_errors():
                arrivals = self._store.add(_ARRIVALS_KEY, 1) if self._store is not None else 0
        if arrivals:
            with translate_peer_errors():
                self._wait_for_arrivals(self._untimed_count * self.size)

    def _wait_for_arrivals(self, num_arrivals: int) -> None:
        """Poll the store until `num_arrivals` blocks have ended.

        A blocking wait would time out, and block the connection.
        """
        pause_s, longest_s = _POLL_PAUSES_S
        while int(self._store.get(_ARRIVALS_KEY)) < num_arrivals:
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, longest_s)

    def duplicate(self) -> Self:
        """Return a world of the same ranks with its own process groups, for use on a different thread.

        All ranks must call this method. Don't close the returned world.
        """
        return self.split([list(range(self.size))])

    def split(self, groups: list[list[int]]) -> Self:
        """Return a world of the ranks in this rank's entry of `groups`, with its own process groups.

        Each rank must be in exactly one entry. All ranks must call this method. Don't close the returned world.
        """
        ranks = self._find_own_group(groups)
        info = RankInfo(ranks.index(self.rank), len(ranks), self.local_rank, self.local_size, "part")
        if all(len(members) == 1 for members in groups):
            return World(info, self.device)
        assert self._groups is not None
        store = None if self._store is None else self.make_store(f"among {ranks}").clone()  # for a different thread
        return replace(self, info=info, _groups=self._groups.split(groups, ranks), _store=store)

    def close(self) -> None:
        """Destroy the default process group, or only Lockstep's groups if the script created the default group.

        This is a no-op if the default process group is already destroyed.
        """
        if self._agreement is not None:
            self._agreement.wait()
        if self._groups is not None:
            self._groups.close()


class RendezvousResult(Protocol):
    """The result of a rendezvous (ranks/rendezvous.py). `store` is None if there is only one rank."""

    @property
    def info(self) -> RankInfo: ...

    @property
    def hosts(self) -> Sequence[str]: ...  # by rank

    @property
    def timeout_s(self) -> float: ...

    @property
    def store(self) -> Any: ...


def open_world(
    rendezvous: RendezvousResult, device: torch.device, backend: Backend = "auto", timeout_s: float | None = None
) -> World:
    """Create the process groups after a rendezvous, and return the world of this rank. All ranks must call this.

    `timeout_s` is the timeout of collectives, and defaults to the timeout of the rendezvous. If the default process
    group already exists, as in a Ray Train worker, it must have the same ranks. It isn't used, and new groups are
    created.
    """
    info = rendezvous.info
    on_gpu = device.type == "cuda"
    tensor_backend = resolve_backend(backend, on_gpu)
    existing = get_process_group_rank()
    if existing is not None and existing != (info.rank, info.size):
        raise UsageError(
            f"torch.distributed: this process is rank {existing[0]} of {existing[1]} in the open process group, "
            f"expected rank {info.rank} of {info.size}; call lockstep.join before you open the group, or after you "
            f"destroy it"
        )
    if rendezvous.store is None:
        return World(info, device)
    if info.local_size == info.size and len(set(rendezvous.hosts)) == 1:
        _use_loopback_interface(info.launcher == "lockstep")
    if tensor_backend == "nccl":
        for name, value in _NCCL_ENV.items():
            os.environ.setdefault(name, value)
    timeout = timedelta(seconds=timeout_s or rendezvous.timeout_s)
    backends = _format_backends(device, tensor_backend)
    with translate_peer_errors():
        group_store = dist.PrefixStore("group", rendezvous.store.unsigned)  # type: ignore[attr-defined]
        if existing is None:
            dist.init_process_group(backends, store=group_store, rank=info.rank, world_size=info.size, timeout=timeout)
        main = dist.group.WORLD if existing is None else dist.new_group(timeout=timeout, backend=backends)
        side = dist.new_group(timeout=timeout, backend=backends)
    assert isinstance(main, dist.ProcessGroup)
    assert isinstance(side, dist.ProcessGroup)
    make_carrier = make_staged_carrier if on_gpu and tensor_backend == "gloo" else make_direct_carrier
    groups = ProcessGroups(main, side, timeout, make_carrier, tensor_backend, None if existing is None else backends)
    world = World(info, device, groups, group_store)
    if world.on_gpu:
        world.device_sharing_groups = _find_ranks_sharing_device(world, tensor_backend)
    return world


def _format_backends(device: torch.device, backend: str) -> str:
    """Return the backends in torch's format, such as `cpu:gloo,cuda:nccl`."""
    return f"cpu:gloo,cuda:{backend}" if device.type == "cuda" else "gloo"


def open_single_rank_group(world: World) -> None:
    """Create a process group with a single rank, for code that requires one. It is never destroyed."""
    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(_format_backends(world.device, world.backend), store=store, rank=0, world_size=1)


def get_process_group_rank() -> tuple[int, int] | None:
    """Return the rank and world size of torch's default process group, or None if no code has created one."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None


def choose_device(device: Literal["auto", "cpu", "cuda"], info: RankInfo, backend: Backend = "auto") -> torch.device:
    """Select the device of this rank, and return it.

    Raises UsageError if there is no such device, or if `backend` doesn't support it.
    """
    count = torch.cuda.device_count()
    check_cuda(device, count)
    on_gpu = device != "cpu" and count > 0
    may_share = resolve_backend(backend, on_gpu) == "gloo"
    if not on_gpu:
        return torch.device("cpu")
    hidden = "CUDA_VISIBLE_DEVICES" in os.environ
    index = choose_device_index(count, info.local_rank, info.local_size, hidden, may_share)
    set_cublas_workspace()
    cuda_device = torch.device("cuda", index)
    torch.cuda.set_device(cuda_device)
    return cuda_device


def _use_loopback_interface(launched: bool) -> None:
    """Make gloo, NCCL and RPC use the loopback interface. Called if all ranks are on this host.

    If Lockstep's own launcher started the ranks (`launched`), overwrites the environment variables that select an
    interface, because the user must have set them for other jobs. Otherwise, keeps the values that the user has set.
    """
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        os.environ[name] = ports.get_loopback_name() if launched else os.environ.get(name, ports.get_loopback_name())


def _find_ranks_sharing_device(world: World, backend: str) -> list[list[int]]:
    """Return the groups of ranks that share a device.

    With the NCCL backend, raises UsageError on all ranks if any ranks share a device, because NCCL's own error is
    unclear. Doesn't raise if NCCL_HOSTID makes NCCL treat these ranks as separate hosts, which works but is slow.
    """
    uuid = str(torch.cuda.get_device_properties(world.device).uuid)

    def group_ranks(name: str) -> list[list[int]]:
        names = world.all_gather_bytes(hashlib.sha256(name.encode()).digest())
        return find_shared_devices({rank: digest.hex() for rank, digest in enumerate(names)})

    groups = group_ranks(uuid)
    if groups and backend == "nccl" and group_ranks(f"{uuid} {os.environ.get('NCCL_HOSTID')}"):
        raise UsageError(
            f"placement.device: ranks {', '.join(map(str, groups[0]))} share one CUDA device; let the launcher assign "
            f"a separate device to each process (srun --gpus-per-task=1), start fewer processes on this host, or use "
            f"{SHARING}"
        )
    return groups
