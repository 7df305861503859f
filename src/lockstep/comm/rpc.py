"""Calls to rank 0 by torch's RPC: what a parameter server is made of.

RPC unpickles what arrives at its ports, so anyone who can connect to them can run code with this user's rights. Nothing
else that ranks exchange can do that (docs/security.md). So there are calls only under a strategy that asks for them,
and they listen at the interface that gloo does.
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

# A call names what it wants, and torch runs it in a thread of its own: so that is kept by process.
_offered: Final[dict[str, Callable[..., Any]]] = {}


@final
class Rpc:
    """This rank's connection to rank 0. All ranks make one together, and close it together."""

    def __init__(self, world: World, *offered: Callable[..., Any]) -> None:
        """On rank 0 take what may be called, by its name; its results are tensors, or futures of them."""
        if not rpc.is_available():
            raise UsageError("strategy parameter_server: this torch was built without RPC; use one that has it, or ddp")
        if not world.rank:
            _offered.update({each.__name__: each for each in offered})
        # gloo's variable says where to listen; TensorPipe has one of its own.
        if (interface := os.environ.get("GLOO_SOCKET_IFNAME")) is not None:
            os.environ.setdefault("TP_SOCKET_IFNAME", interface)
        # The ranks have joined already: torch gets the store from where it would look for one.
        store, scheme = world.own_store("calls"), f"lockstep-{os.urandom(8).hex()}"

        def own_store(_: object) -> Iterator[tuple[Any, int, int]]:
            yield store, world.rank, world.size

        dist.register_rendezvous_handler(scheme, own_store)  # type: ignore[attr-defined, no-untyped-call]
        options = rpc.TensorPipeRpcBackendOptions(
            init_method=f"{scheme}://",
            rpc_timeout=world.timeout_s,
            _transports=["uv"],  # the others open a port for each of their lanes
            _channels=["basic"],
        )
        with warnings.catch_warnings(), translate_peer_errors():
            # torch's own code, in torch 2.15, calls an exchange of its own in a way that it warns of.
            warnings.filterwarnings("ignore", message="You are using a Backend")
            rpc.init_rpc(  # type: ignore[no-untyped-call]
                f"rank{world.rank}", rank=world.rank, world_size=world.size, rpc_backend_options=options
            )

    def ask(self, name: str, *arguments: Any) -> Any:
        """Return what the function of this name returns on rank 0, once it does; tensors have to be on the CPU."""
        return rpc.rpc_sync("rank0", _answer, (name, *arguments))

    def close(self) -> None:
        """Wait until no rank has calls any more, and take none."""
        rpc.shutdown()
        _offered.clear()


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def _answer(name: str, *arguments: Any) -> Future[Any]:
    result = _offered[name](*arguments)
    if isinstance(result, Future):
        return result  # waiting for it keeps no thread
    done: Future[Any] = Future()
    done.set_result(result)
    return done
