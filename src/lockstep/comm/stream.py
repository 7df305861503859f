"""Side streams for communication, which run concurrently with the compute stream.

On the CPU, a side stream is a thread. While gloo waits in this thread, it doesn't hold the GIL, so the backward pass
can run. On CUDA, it is a CUDA stream: NCCL calls return immediately, and the stream orders them relative to the
kernels. Functions run in the order of submission.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar, final

import torch

T = TypeVar("T")
Result = TypeVar("Result", covariant=True)


class PendingResult(Protocol[Result]):
    """Waits for a result and returns it. On the CPU, raises TimeoutError after `timeout_s`."""

    def __call__(self, timeout_s: float | None = None) -> Result: ...


class CommStream(Protocol):
    """Runs functions in the order of submission. `submit` returns a callable that waits for the result."""

    def submit(self, function: Callable[[], T]) -> PendingResult[T]: ...

    def close(self) -> None: ...


@final
class InlineStream:
    """Runs each function immediately in `submit`. Used in a world of size 1."""

    def submit(self, function: Callable[[], T]) -> PendingResult[T]:
        result = function()
        return lambda timeout_s=None: result

    def close(self) -> None:
        pass


@final
class ThreadStream:
    """Runs functions on a single background thread.

    If a function fails, all functions submitted after it fail with the same error and don't run. Otherwise, a peer
    could match the next transfer with the failed one, and if their sizes differ, gloo would abort the peer's process.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "stream")
        self._error: BaseException | None = None

    def submit(self, function: Callable[[], T]) -> PendingResult[T]:
        future = self._executor.submit(self._run, function)

        def wait(timeout_s: float | None = None) -> T:  # not a lambda, so that stack traces show the wait
            return future.result(timeout_s)

        return wait

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _run(self, function: Callable[[], T]) -> T:
        if self._error is not None:
            raise self._error
        try:
            return function()
        except BaseException as error:
            self._error = error
            raise


@final
class CudaStream:
    """Runs functions on a CUDA stream. Each function waits for the work that is already on the compute stream.

    If a function were released early, torch's allocator could reuse the memory of its tensors on the compute stream
    before this stream has read them. Therefore each function and its tensors are kept alive until the function is known
    to be complete or the compute stream waits for it. Tensors that this stream allocates are safe: before it allocates
    new memory, it waits for the compute stream.

    This stream and the compute stream use two NCCL process groups, which could deadlock if they waited for each other.
    Therefore all ranks submit functions in the same order, and after a step, the compute stream only communicates after
    `wait`. In zero3, both streams communicate at the same time. This works because NCCL's kernels only occupy a few of
    the GPU's multiprocessors.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._in_flight: deque[tuple[torch.cuda.Event, Callable[[], object]]] = deque()

    def submit(self, function: Callable[[], T]) -> PendingResult[T]:
        while self._in_flight and self._in_flight[0][0].query():  # type: ignore[no-untyped-call]
            self._in_flight.popleft()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            result = function()
        self._in_flight.append((self._stream.record_event(), function))

        def wait(timeout_s: float | None = None) -> T:
            torch.cuda.current_stream().wait_stream(self._stream)
            self._in_flight.clear()
            return result

        return wait

    def close(self) -> None:
        self._stream.synchronize()
