"""A second stream for communication, beside the one that computes.

On the CPU a stream is one thread: gloo waits there without the interpreter's lock while backward runs. On CUDA it is
a stream: NCCL's calls return at once and order themselves against the kernels. What is submitted runs in order.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar, final

import torch

T = TypeVar("T")
Result = TypeVar("Result", covariant=True)


class Pending(Protocol[Result]):
    """Waits for a result: on the CPU for at most `timeout_s`, after which it raises TimeoutError."""

    def __call__(self, timeout_s: float | None = None) -> Result: ...


class CommStream(Protocol):
    """Runs functions in the order of submission; calling what `submit` returns waits for the result."""

    def submit(self, function: Callable[[], T]) -> Pending[T]: ...

    def close(self) -> None: ...


@final
class InlineStream:
    """No stream at all: for a world of one."""

    def submit(self, function: Callable[[], T]) -> Pending[T]:
        result = function()
        return lambda timeout_s=None: result

    def close(self) -> None:
        pass


@final
class ThreadStream:
    """One thread.

    What stands behind a function that failed is not run, and fails with it. Of two exchanges of which a rank skipped
    the first, a peer would take the message of the second for that of the first; where their lengths differ, gloo ends
    the peer's process.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "stream")
        self._failed: BaseException | None = None

    def submit(self, function: Callable[[], T]) -> Pending[T]:
        future = self._executor.submit(self._run, function)

        def wait(timeout_s: float | None = None) -> T:  # a frame of its own: a stack shows what is waited for
            return future.result(timeout_s)

        return wait

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _run(self, function: Callable[[], T]) -> T:
        if self._failed is not None:
            raise self._failed
        try:
            return function()
        except BaseException as error:
            self._failed = error
            raise


@final
class CudaStream:
    """One CUDA stream, which starts from where the computing stream is at submission.

    torch's allocator would give what a function was handed to the computing stream again as soon as nobody holds it,
    though this stream may not have read it yet. So functions are kept, with all they hold, until they are seen to be
    over, or the computing stream waits for them. What this stream makes needs no such care: before it makes anything
    new, it waits for the computing stream.

    NCCL's exchanges here and those of the computing stream are in two groups, which cannot wait for each other
    crosswise: all ranks submit in one order, and what the computing stream exchanges after a step it exchanges behind
    `wait`. In zero3 both are under way at once, each as a kernel on a few of the card's processors.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._kept: deque[tuple[torch.cuda.Event, Callable[[], object]]] = deque()

    def submit(self, function: Callable[[], T]) -> Pending[T]:
        while self._kept and self._kept[0][0].query():  # type: ignore[no-untyped-call]
            self._kept.popleft()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            result = function()
        self._kept.append((self._stream.record_event(), function))

        def wait(timeout_s: float | None = None) -> T:
            torch.cuda.current_stream().wait_stream(self._stream)
            self._kept.clear()
            return result

        return wait

    def close(self) -> None:
        self._stream.synchronize()
