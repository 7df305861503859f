"""Samples on their way to the device: from pinned memory, on a side stream, while the device computes.

What has arrived belongs to the side stream in the eyes of torch's allocator, so `record_stream` keeps its memory from
being given out again before the computing stream is done with it. The pinned memory needs no such care: torch's
allocator of pinned memory marks a block with each copy that reads it, and gives it out again when those are over.
"""

from collections.abc import Callable, Iterator
from typing import TypeVar, final

import torch

from lockstep.core.batch import Batch, like, tensors_of

T = TypeVar("T")
Arrival = Callable[[], Batch]  # gives what was sent, for whatever the caller's stream computes after it


@final
class Copies:
    """Brings tensors of the CPU to the device that computes: its stream waits for a copy, this process does not.

    `steps_ahead` is how many steps before its use a copy is started: the steps of a process that waits for its device
    in every step, as with fp16, would start with a copy otherwise. On the CPU tensors are where they are used.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self.steps_ahead = int(on_gpu)

    def start(self, batch: Batch) -> Arrival:
        """Start copying, and return what to call where the copies are used. It is called once, and never waits."""
        if self._stream is None:
            return lambda: batch
        # A copy from memory that is not pinned would wait for all that its stream has to do.
        pinned = [tensor if tensor.is_pinned() else tensor.pin_memory() for tensor in tensors_of(batch)]
        with torch.cuda.stream(self._stream):
            copies = [tensor.to(self._device, non_blocking=True) for tensor in pinned]
            done = self._stream.record_event()

        def wait() -> Batch:
            computing = torch.cuda.current_stream(self._device)
            computing.wait_event(done)
            for copy in copies:
                copy.record_stream(computing)
            return like(batch, copies)

        return wait


def prefetch(items: Iterator[T], count: int) -> Iterator[T]:
    """Yield `items`, each when the `count` after it have been made. An error is raised where its item would stand."""
    made: list[T] = []
    try:
        for item in items:
            made.append(item)
            if len(made) > count:
                yield made.pop(0)
    except Exception:
        yield from made
        raise
    yield from made
