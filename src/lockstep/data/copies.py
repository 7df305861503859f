"""Copies batches from pinned memory to the device on a side stream, while the device computes.

In torch's caching allocator, the copied tensors belong to the side stream. `record_stream` prevents the allocator from
reusing their memory before the compute stream is done with them. The pinned memory doesn't need this, because torch's
allocator for pinned memory tracks the copies from a block and only reuses the block after the copies have completed.
"""

from collections.abc import Callable, Iterator
from typing import TypeVar, final

import torch

from lockstep.core.batch import Batch, like, tensors_of

T = TypeVar("T")
FinishCopy = Callable[[], Batch]  # returns the copied batch, and makes the caller's current stream wait for the copy


@final
class DeviceCopier:
    """Copies CPU tensors to the device asynchronously. On the CPU, it returns the tensors themselves.

    `steps_ahead` is the number of steps between the start of a copy and the use of its batch. If it were 0, a process
    that synchronizes with the device in every step, as with fp16, would wait for a copy at the start of each step.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self.steps_ahead = int(on_gpu)

    def start(self, batch: Batch) -> FinishCopy:
        """Start to copy a batch, and return a function that returns the copy.

        Call the returned function once, when you need the copy. Calling it never blocks the process.
        """
        if self._stream is None:
            return lambda: batch
        # A copy from memory that isn't pinned would block until the side stream is idle.
        pinned = [tensor if tensor.is_pinned() else tensor.pin_memory() for tensor in tensors_of(batch)]
        with torch.cuda.stream(self._stream):
            copies = [tensor.to(self._device, non_blocking=True) for tensor in pinned]
            copy_event = self._stream.record_event()

        def wait() -> Batch:
            computing = torch.cuda.current_stream(self._device)
            computing.wait_event(copy_event)
            for copy in copies:
                copy.record_stream(computing)
            return like(batch, copies)

        return wait


def prefetch(items: Iterator[T], count: int) -> Iterator[T]:
    """Yield `items`, but fetch `count` items ahead from the iterator.

    If the iterator raises an exception, the items before it are yielded first.
    """
    buffer: list[T] = []
    try:
        for item in items:
            buffer.append(item)
            if len(buffer) > count:
                yield buffer.pop(0)
    except Exception:
        yield from buffer
        raise
    yield from buffer
