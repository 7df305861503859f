"""Horovod's all-reduce over the ranks of a world. All other communication uses the process groups of the world.

horovodrun and mpirun tell Horovod where its ranks are. With all other launchers, rank 0 runs Horovod's rendezvous
server: an HTTP key-value store in which ranks look up each other's addresses. If all ranks are on the same host, the
server only listens on the loopback interface.
"""

import os
import socket
from collections.abc import Mapping
from importlib import import_module
from threading import Thread
from typing import Any, Final, Literal, final

import torch
from torch import Tensor

from lockstep.comm.canonical import VectorSum, add_pieces
from lockstep.comm.peer_errors import translate_peer_errors
from lockstep.comm.world import World
from lockstep.core.tree import LeafBlock
from lockstep.device import ports
from lockstep.errors import UsageError

Compression = Literal["none", "fp16"]


_LAUNCHER_VARIABLES: Final = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK")  # set by horovodrun and by mpirun


@final
class Horovod:
    """The initialized Horovod library. All ranks must create this object at the same time."""

    def __init__(self, world: World) -> None:
        try:
            self._horovod: Any = import_module("horovod.torch")
        except ImportError as error:
            raise UsageError(
                f"strategy horovod: cannot import Horovod ({error}); build it for this torch with "
                f"scripts/install-horovod, or use strategy ddp"
            ) from error
        self._server: Any = None
        self._set_environment(world)
        with translate_peer_errors():
            self._horovod.init()
        reported = self._horovod.rank(), self._horovod.size()
        if reported != (world.rank, world.size):
            raise UsageError(
                f"strategy horovod: Horovod reports rank {reported[0]} of {reported[1]}, but this process is rank "
                f"{world.rank} of {world.size}; start it with horovodrun, or with lockstep train placement.processes="
                f"{world.size}"
            )
        if world.on_gpu and not self._horovod.nccl_built():
            raise UsageError(
                "strategy horovod: Horovod was built without NCCL; use placement.device=cpu, or use strategy ddp"
            )

    def broadcast(self, tensors: Mapping[str, Tensor]) -> None:
        """Broadcast tensors from rank 0 to all ranks."""
        with translate_peer_errors():
            self._horovod.broadcast_parameters(dict(tensors), root_rank=0)

    def make_sum(self, compression: Compression) -> VectorSum:
        """Return a replacement for CanonicalSum (comm/canonical.py) that sums with Horovod's all-reduce."""
        compressor = getattr(self._horovod.Compression, compression)

        def sum_over_ranks(pieces: Mapping[LeafBlock, Tensor], num_leaves: int, like: Tensor) -> Tensor:
            vector = add_pieces(pieces, like)
            # Horovod keeps state for each name between steps. Only one sum runs at a time, so vectors of the same
            # length and dtype can share a name.
            name = f"gradients {len(like)} {like.dtype}"
            with translate_peer_errors(), torch.no_grad():
                total: Tensor = self._horovod.allreduce(vector, name=name, op=self._horovod.Sum, compression=compressor)
            return total

        return sum_over_ranks

    def close(self) -> None:
        """Shut down Horovod on all ranks."""
        self._horovod.shutdown()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def _set_environment(self, world: World) -> None:
        """Set Horovod's environment variables for the locations of the ranks and for the timeouts."""
        timeout = str(int(min(world.timeout_s, 86400)))
        variables = {
            "HOROVOD_GLOO_TIMEOUT_SECONDS": timeout,
            "HOROVOD_STALL_CHECK_TIME_SECONDS": timeout,
            "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(int(timeout) + 1),
        }
        if not any(name in os.environ for name in _LAUNCHER_VARIABLES):
            variables |= self._start_rendezvous(world)
        for name, value in variables.items():
            os.environ.setdefault(name, value)

    def _start_rendezvous(self, world: World) -> dict[str, str]:
        """Start the rendezvous server on rank 0. Returns Horovod's environment variables for this rank."""
        is_single_host = world.local_size == world.size
        address = ""
        if not world.rank:
            http_server = import_module("horovod.runner.http.http_server")
            host = "127.0.0.1" if is_single_host else socket.gethostbyname(world.host)
            server = http_server.RendezvousHTTPServer((host, 0), http_server.RendezvousHandler, 0)
            Thread(target=server.serve_forever, daemon=True).start()
            self._server = server
            address = " ".join(map(str, server.server_address[:2]))
        host, port = world.broadcast_text(address).split()
        interface = (
            {"HOROVOD_GLOO_IFACE": os.environ.get("GLOO_SOCKET_IFNAME", ports.get_loopback_name())}
            if is_single_host
            else {}
        )
        return interface | {
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": host,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": port,
            "HOROVOD_HOSTNAME": world.host,
            "HOROVOD_RANK": str(world.rank),
            "HOROVOD_SIZE": str(world.size),
            "HOROVOD_LOCAL_RANK": str(world.local_rank),
            "HOROVOD_LOCAL_SIZE": str(world.local_size),
            "HOROVOD_CROSS_RANK": str(world.rank // world.local_size),
            "HOROVOD_CROSS_SIZE": str(world.size // world.local_size),
        }
