"""Pretended streams for what runs on the CPU: what two of them do to one memory in no order, as on a CUDA device.

    with Streams() as streams:
        ...                   # training on the CPU, by fully_shard too
    assert not streams.races  # what, and where

Where tests/card.py pretends tensors, this leaves them as they are, so that fully_shard takes them. Collectives run as
NCCL's do: those that are waited for on the current stream, sends and receives on one of their own, which the current
stream waits for in Transfer.wait. Memory that is freed is given out again to the stream that made it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, final

import torch
from card import DEVICE, Event, Memory, Pretended, Stream, arguments
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param, _fsdp_param_group, _fsdp_state
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from lockstep.comm.carrier import Transfer
from lockstep.comm.stream import CudaStream
from lockstep.comm.world import World

_SENT = {"c10d::send", "c10d::recv_"}
_WRITTEN = {"c10d::recv_", "c10d::allreduce_"}


@final
class Streams(Pretended):
    """Enter it to have the streams. `races` are texts."""

    def __init__(self) -> None:
        super().__init__()
        self._nccl = Stream()
        self._memories: dict[int, tuple[StorageWeakRef, Memory]] = {}

    def __enter__(self) -> Streams:  # type: ignore[override]
        handle = SimpleNamespace(Stream=lambda **_: Stream(), Event=self._event, stream=self._order.on)
        handle.current_stream = lambda device=None: self._order.now
        wait, free, alloc = Transfer.wait, _fsdp_param.free_storage, _fsdp_param.alloc_storage
        modules = _fsdp_collectives, _fsdp_param, _fsdp_param_group, _fsdp_state
        everywhere = {
            "_get_device_handle": lambda *_: handle,
            "alloc_storage": lambda tensor: (alloc(tensor), self._memory(tensor)),
        }
        self.replace(
            *((each, name, new) for each in modules for name, new in everywhere.items() if hasattr(each, name)),
            (_fsdp_param, "free_storage", lambda tensor: (self._forget(tensor), free(tensor))),
            (torch.accelerator, "current_stream", handle.current_stream),
            (World, "on_gpu", True),
            (World, "make_stream", lambda world: CudaStream(DEVICE)),
            (Transfer, "wait", lambda transfer: (wait(transfer), self._order.now.wait_stream(self._nccl))),
        )
        super().__enter__()
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name, stream = kwargs or {}, func._schema.name, self._order.now
        for key in [key for key, (storage, _) in self._memories.items() if storage.expired()]:
            del self._memories[key]
        if name in _SENT:
            self._nccl.wait_stream(stream)
            stream = self._nccl
        for argument, value, written in arguments(func, args, kwargs):
            collective = name.startswith("c10d::")
            writes = "output" in argument.name or name in _WRITTEN if collective else written
            if argument.alias_info is None or writes:  # else it is a view that is made
                for memory in filter(None, map(self._memory, tree_leaves(value))):
                    self._order.use(memory, writes, name, stream)
        result = func(*args, **kwargs)
        for each in tree_leaves(result):
            self._memory(each)
        return result

    def _memory(self, tensor: Any) -> Memory | None:
        """Return the memory of a tensor, made now where it has none yet; whole numbers are messages, of the host."""
        if not isinstance(tensor, Tensor) or isinstance(tensor, DTensor) or tensor.dtype == torch.int64:
            return None
        storage = tensor.untyped_storage()
        if tensor.device.type != "cpu" or not storage.size():
            return None
        if storage._cdata not in self._memories:
            self._memories[storage._cdata] = StorageWeakRef(storage), self._order.make()
        return self._memories[storage._cdata][1]

    def _forget(self, tensor: Tensor) -> None:
        self._memories.pop(tensor.untyped_storage()._cdata, None)

    def _event(self, *_: Any) -> Event:
        event = Event({})
        event.record = lambda: event.seen.update(self._order.now.seen)  # type: ignore[attr-defined]
        return event
