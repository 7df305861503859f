"""Copies batches from pinned memory to the device on a side stream, while the device computes.

The copied tensors are allocated on the side stream. `record_stream` prevents torch's caching allocator from reusing
their memory before the compute stream is done with them. Pinned memory doesn't need this call, because torch's pinned
memory allocator tracks copies, and only reuses a block after all copies from it have completed.
"""

from collections.abc import Callable, Iterator
from typing import TypeVar, final

import torch

from lockstep.core.batch import Batch, get_tensors, replace_tensors

T = TypeVar("T")
FinishCopy = Callable[[], Batch]  # returns the copied batch, after making the current stream wait for the copy


@final
class DeviceCopier:
    """Copies batches from the CPU to the device asynchronously. If the device is the CPU, nothing is copied.

    `steps_ahead` is the number of steps by which a batch is copied in advance. If the copy started in the step that
    uses the batch, it would delay processes that synchronize with the device in every step, as with fp16.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self.steps_ahead = int(on_gpu)

    def start_copy(self, batch: Batch) -> FinishCopy:
        """Start copying a batch to the device. Return a function that returns the copied batch.

        Call that function once, when the batch is needed. The call doesn't block the process.
        """
        if self._stream is None:
            return lambda: batch
        # A copy from pageable memory would block the process until the side stream is idle.
        pinned = [tensor if tensor.is_pinned() else tensor.pin_memory() for tensor in get_tensors(batch)]
        with torch.cuda.stream(self._stream):
            copies = [tensor.to(self._device, non_blocking=True) for tensor in pinned]
            copy_event = self._stream.record_event()

        def wait() -> Batch:
            compute_stream = torch.cuda.current_stream(self._device)
            compute_stream.wait_event(copy_event)
            for copy in copies:
                copy.record_stream(compute_stream)
            return replace_tensors(batch, copies)

        return wait


def prefetch(items: Iterator[T], count: int) -> Iterator[T]:
    """Yield the items of an iterator, with `count` items fetched in advance.

    If the iterator raises an exception, the items that have already been fetched are yielded first.
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
