"""Calls to rank 0 over torch's RPC, for a parameter server.

RPC unpickles the data that arrives at its ports, so anyone who can connect to these ports can run code as your user. No
other communication between ranks allows this (docs/security.md). Therefore RPC is only started for strategies that
require it. It listens on the same interface as gloo.
"""

import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Final, final

import torch.distributed as dist
from torch.distributed import rpc
from torch.futures import Future

from lockstep.comm.peer_errors import translate_peer_errors
from lockstep.comm.world import World
from lockstep.errors import UsageError

# The functions that ranks can call, by name. Global, because a call only contains a name and runs in its own thread.
_functions: Final[dict[str, Callable[..., Any]]] = {}


@final
class Rpc:
    """The RPC connection of this rank to rank 0. All ranks must create and close this object at the same time."""

    def __init__(self, world: World, *functions: Callable[..., Any]) -> None:
        """Connect to rank 0, which serves these functions. They must return tensors or futures of tensors."""
        if not rpc.is_available():
            raise UsageError(
                "strategy parameter_server: this torch was built without RPC; install a build with RPC, or use "
                "strategy ddp"
            )
        if not world.rank:
            _functions.update({function.__name__: function for function in functions})
        # Also use gloo's interface for TensorPipe, which reads a different variable.
        if (interface := os.environ.get("GLOO_SOCKET_IFNAME")) is not None:
            os.environ.setdefault("TP_SOCKET_IFNAME", interface)
        # The ranks are already connected, so RPC uses their store instead of a new rendezvous.
        store, scheme = world.make_store("calls"), f"lockstep-{os.urandom(8).hex()}"

        def yield_store(_: object) -> Iterator[tuple[Any, int, int]]:
            yield store, world.rank, world.size

        dist.register_rendezvous_handler(scheme, yield_store)  # type: ignore[attr-defined, no-untyped-call]
        options = rpc.TensorPipeRpcBackendOptions(
            init_method=f"{scheme}://",
            rpc_timeout=world.timeout_s,
            _transports=["uv"],  # other transports open one port per lane
            _channels=["basic"],
        )
        with warnings.catch_warnings(), translate_peer_errors():
            # torch 2.15 itself triggers this deprecation warning.
            warnings.filterwarnings("ignore", message="You are using a Backend")
            rpc.init_rpc(  # type: ignore[no-untyped-call]
                f"rank{world.rank}", rank=world.rank, world_size=world.size, rpc_backend_options=options
            )

    def call_server(self, function_name: str, *arguments: Any) -> Any:
        """Call the function `function_name` on rank 0 and return its result. Tensors must be on the CPU."""
        return rpc.rpc_sync("rank0", _call_function, (function_name, *arguments))

    def close(self) -> None:
        """Wait until no rank makes further calls, and stop accepting calls."""
        rpc.shutdown()
        _functions.clear()


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def _call_function(function_name: str, *arguments: Any) -> Future[Any]:
    result = _functions[function_name](*arguments)
    if isinstance(result, Future):
        return result  # no thread is blocked until the future completes
    future: Future[Any] = Future()
    future.set_result(result)
    return future
