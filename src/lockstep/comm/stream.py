"""A second stream for communication, next to the stream that computes.

On the CPU, a stream is a thread: gloo waits in it without the GIL while backward runs. On CUDA, it is a CUDA stream:
calls of NCCL return immediately and are ordered with the kernels. Functions run in the order in which they are
submitted.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar, final

import torch

T = TypeVar("T")
Result = TypeVar("Result", covariant=True)


class Pending(Protocol[Result]):
    """Waits for a result. On the CPU, it waits for at most `timeout_s` seconds, and then raises TimeoutError."""

    def __call__(self, timeout_s: float | None = None) -> Result: ...


class CommStream(Protocol):
    """Runs functions in the order of submission. `submit` returns a callable that waits for the result."""

    def submit(self, function: Callable[[], T]) -> Pending[T]: ...

    def close(self) -> None: ...


@final
class InlineStream:
    """Runs functions immediately, for a world of size 1."""

    def submit(self, function: Callable[[], T]) -> Pending[T]:
        result = function()
        return lambda timeout_s=None: result

    def close(self) -> None:
        pass


@final
class ThreadStream:
    """A single thread.

    If a function fails, all functions submitted after it fail with the same error and don't run. Otherwise, a peer
    could mistake the message of the second transfer for that of the first, which this rank skipped. If their lengths
    differ, gloo ends the process of the peer.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "stream")
        self._failed: BaseException | None = None

    def submit(self, function: Callable[[], T]) -> Pending[T]:
        future = self._executor.submit(self._run, function)

        def wait(timeout_s: float | None = None) -> T:  # a named frame, so that stacks show the wait
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
    """A CUDA stream. Each function starts from the state of the computing stream at submission.

    torch's allocator would return the tensors of a function to the computing stream as soon as they are released, even
    if this stream hasn't read them yet. Therefore functions are kept, with everything they refer to, until they are
    known to be complete or the computing stream waits for them. Tensors that this stream allocates need no such care:
    before it allocates new memory, it waits for the computing stream.

    The NCCL operations of this stream and those of the computing stream are in two groups, which must not wait for each
    other in a cycle. Therefore all ranks submit in the same order, and communication of the computing stream after a
    step comes after `wait`. In zero3, both run at once, each as a kernel on a few of the GPU's multiprocessors.
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
