"""Pretended streams for what runs on the CPU: what two of them do to one memory in no order, as on a CUDA device.

    with Streams() as streams:
        ...                   # training on the CPU, by fully_shard too
    assert not streams.races  # what, and where

Where tests/card.py pretends tensors, this leaves them as they are, so that fully_shard takes them. Collectives run as
NCCL's do: those that are waited for on the current stream, sends and receives on one of their own, which the current
stream waits for in Transfer.wait. Memory that is freed is given out again to the stream that made it.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from types import SimpleNamespace
from typing import Any, final
from unittest.mock import patch

import torch
from card import DEVICE, Event, Stream
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param, _fsdp_param_group, _fsdp_state
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lockstep.comm.carrier import Transfer
from lockstep.comm.stream import CudaStream
from lockstep.comm.world import World

_SENT = {"c10d::send", "c10d::recv_"}
_WRITTEN = {"c10d::recv_", "c10d::allreduce_"}
_SOURCES = ("/lockstep/", "/_fully_shard/")


@final
class _Memory:
    """Who made, wrote and read a memory, and where it was made."""

    def __init__(self, maker: Stream) -> None:
        self.maker = maker
        self.written: dict[int, int] = {}
        self.read: dict[int, int] = {}
        self.place = _place()

    def free(self) -> None:
        self.maker.freed.append({key: max(self.read.get(key, 0), time) for key, time in self.written.items()})
        self.maker.freed.append(self.read)


@final
class Streams(TorchDispatchMode):
    """Enter it to have the streams. `races` are texts."""

    def __init__(self) -> None:
        super().__init__()
        self.races: list[str] = []
        self._stream, self._nccl = Stream(), Stream()
        self._memories: dict[int, tuple[StorageWeakRef, _Memory]] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Streams:  # type: ignore[override]
        handle = SimpleNamespace(Stream=lambda **_: Stream(), Event=self._event, stream=self._on, is_available=bool)
        handle.current_stream = lambda device=None: self._stream
        wait, free, alloc = Transfer.wait, _fsdp_param.free_storage, _fsdp_param.alloc_storage
        modules = _fsdp_collectives, _fsdp_param, _fsdp_param_group, _fsdp_state
        for target, name, new in (
            *((each, "_get_device_handle", lambda *_: handle) for each in modules),
            *((each, "alloc_storage", lambda tensor: self._allocate(tensor, alloc)) for each in modules),
            (_fsdp_param, "free_storage", lambda tensor: self._free(tensor, free)),
            (torch.accelerator, "current_stream", handle.current_stream),
            (torch.cuda, "Stream", Stream),
            (torch.cuda, "current_stream", handle.current_stream),
            (torch.cuda, "stream", self._on),
            (World, "on_gpu", True),
            (World, "stream", lambda world: CudaStream(DEVICE)),
            (Transfer, "wait", lambda transfer: (wait(transfer), self._stream.wait_stream(self._nccl))),
        ):
            if hasattr(target, name):
                self._stack.enter_context(patch.object(target, name, new))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stack.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name, stream = kwargs or {}, func._schema.name, self._stream
        self._sweep()
        if name in _SENT:
            self._nccl.wait_stream(stream)
            stream = self._nccl
        values = [*zip(func._schema.arguments, args, strict=False)]
        values += [(each, kwargs[each.name]) for each in func._schema.arguments if each.name in kwargs]
        for argument, value in values:
            alias = argument.alias_info
            writes = alias is not None and alias.is_write
            if name.startswith("c10d::"):
                writes = "output" in argument.name or name in _WRITTEN
            if alias is None or writes:  # else it is a view that is made
                for each in tree_leaves(value):
                    self._use(each, stream, writes, name)
        result = func(*args, **kwargs)
        for each in tree_leaves(result):
            self._memory(each, made=True)
        return result

    def _use(self, tensor: Any, stream: Stream, writes: bool, name: str) -> None:
        if (memory := self._memory(tensor, made=False)) is None:
            return
        if not stream.has_seen(memory.written) or (writes and not stream.has_seen(memory.read)):
            self.races.append(f"{name} of what another stream uses, made by {memory.place}: {_place()}")
        (memory.written if writes else memory.read)[id(stream)] = stream.tick()

    def _memory(self, tensor: Any, made: bool) -> _Memory | None:
        if not isinstance(tensor, Tensor) or tensor.device.type != "cpu":
            return None
        storage = None
        with suppress(RuntimeError, NotImplementedError):  # DTensor, and what else has none of its own
            storage = tensor.untyped_storage()
        if storage is None or not storage.size():
            return None
        if storage._cdata not in self._memories:
            memory = _Memory(self._stream)
            self._memories[storage._cdata] = StorageWeakRef(storage), memory
            if made:
                if not all(map(memory.maker.has_seen, memory.maker.freed)):
                    self.races.append(f"made where another stream may still read: {memory.place}")
                memory.maker.freed.clear()
                memory.written[id(memory.maker)] = memory.maker.tick()
        return self._memories[storage._cdata][1]

    def _sweep(self) -> None:
        for key in [key for key, (storage, _) in self._memories.items() if storage.expired()]:
            self._memories.pop(key)[1].free()

    def _free(self, tensor: Tensor, free: Any) -> None:
        if (found := self._memories.pop(tensor.untyped_storage()._cdata, None)) is not None:
            found[1].free()
        free(tensor)

    def _allocate(self, tensor: Tensor, allocate: Any) -> None:
        allocate(tensor)
        self._memory(tensor, made=True)

    def _event(self, *_: Any) -> Event:
        event = Event({})
        event.record = lambda: event.seen.update(self._stream.seen)  # type: ignore[attr-defined]
        return event

    @contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        before, self._stream = self._stream, stream
        try:
            yield
        finally:
            self._stream = before


def _place() -> str:
    """Return the innermost lines of ours and of fully_shard, the last one first."""
    walk = ((frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in traceback.walk_stack(None))
    frames = islice((each for each in walk if any(own in each[0] for own in _SOURCES)), 3)
    return " < ".join(f"{file.rpartition('/')[2]}:{line} ({name})" for file, line, name in frames)
