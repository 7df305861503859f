"""Copies samples to the device from pinned memory, on a side stream, while the device computes.

In torch's caching allocator, the copied tensors belong to the side stream. `record_stream` prevents their memory from
being reused before the computing stream is done with it. The pinned memory doesn't need this: torch's allocator for
pinned memory records each copy that reads a block, and only reuses the block after these copies have completed.
"""

from collections.abc import Callable, Iterator
from typing import TypeVar, final

import torch

from lockstep.core.batch import Batch, like, tensors_of

T = TypeVar("T")
Arrival = Callable[[], Batch]  # returns the copied batch, for use on the caller's current stream


@final
class Copies:
    """Copies CPU tensors to the device. The computing stream waits for a copy, but this process doesn't.

    `steps_ahead` is the number of steps by which a copy starts before its batch is used. Without it, a process that
    waits for the device in every step, as with fp16, would begin each step with a copy. On the CPU, tensors are used in
    place.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self.steps_ahead = int(on_gpu)

    def start(self, batch: Batch) -> Arrival:
        """Start copying, and return a function that returns the copies.

        Call it once, when you need them. It never blocks.
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
    """Yield `items`, each after the next `count` items have been made.

    If making an item fails, the items before it are yielded first.
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
