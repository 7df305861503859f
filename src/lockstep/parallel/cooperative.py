"""Cooperative functions: functions that run interleaved in one process, and wait for each other at exchanges.

An exchange is like a collective: all functions call it with their inputs, and each function gets a result. For example,
a layer that computes over several micro-batches needs an exchange between the forward passes of these micro-batches.

Each function has its own thread, but only one thread runs at a time. The order in which threads run depends only on the
order of the functions:

    caller       Continue    Continue    Compute       Continue    Continue
                  |           |             |           |           |
    thread 0     runs       waits         waits        runs       waits         until the next exchange
    thread 1     waits      runs        computes       waits      runs          or the end of the function
                  |           |             |           |           |
    caller       Waiting     Waiting     Computed      Waiting     Waiting

1. The functions run one after the other, each until its next exchange. Before a function continues, its RNG states are
   restored, so each function draws the same random numbers as if it ran alone.
2. When all functions have reached the same exchange, the thread of the last function computes the results of all
   functions from the inputs of all functions. Therefore autograd records one node with all inputs, and a single
   backward pass goes through all graphs. Separate backward passes wouldn't work, because they would have to wait for
   each other, and autograd runs all backward passes of a CUDA device on a single thread.
3. Each function continues with its result.

A backward pass visits autograd nodes by sequence number, newest first. If a tensor is used several times, its gradients
are added in this order. Each thread numbers its nodes separately. Therefore each exchange sets the sequence numbers of
all threads to the same value. In the joint backward pass, the nodes of a function then have the same order as if the
function ran alone, and its gradients have the same bits.
"""

import contextvars
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple, TypeVar, final

import torch
from torch import Generator

from lockstep.errors import UsageError

T = TypeVar("T")

# Maps the inputs of all functions to one result for each function.
JointFunction = Callable[[Sequence[Any]], Sequence[Any]]


class _WaitingReply(NamedTuple):
    """The reply of a function that waits at exchange `label`, with the next sequence number of its thread."""

    label: str
    joint: JointFunction
    inputs: Any
    sequence_number: int


class _ComputedReply(NamedTuple):
    """The reply with the results of all functions, and the next sequence number after their computation."""

    results: Sequence[Any]
    sequence_number: int


class _ReturnedReply(NamedTuple):
    """The reply of a function that has returned `result`."""

    result: Any


class _ComputeRequest(NamedTuple):
    """A request to compute the results of all functions, with sequence numbers no lower than `sequence_number`."""

    joint: JointFunction
    inputs: Sequence[Any]
    sequence_number: int


class _ContinueRequest(NamedTuple):
    """A request to continue with the result of the exchange, with sequence numbers no lower than `sequence_number`."""

    result: Any
    sequence_number: int


@final
class CooperativeScheduler:
    """Runs functions interleaved. Functions can call `exchange`, and draw random numbers from `generators`."""

    def __init__(self, generators: Sequence[Generator]) -> None:
        self._generators = generators
        self._running: _FunctionThread | None = None  # the thread that is running, if there are several functions

    @property
    def in_progress(self) -> bool:
        """Whether `run` is in progress with more than one function."""
        return self._running is not None

    def exchange(self, label: str, joint: JointFunction, inputs: Any) -> Any:
        """Call `joint` with the `inputs` of all functions, and return the result for this function.

        Blocks until all functions have called this method. They must reach the same exchanges, identified by `label`,
        in the same order.
        """
        return joint([inputs])[0] if self._running is None else self._running.wait_at(label, joint, inputs)

    def run(self, functions: Sequence[Callable[[], T]], before_resume: Callable[[int], None]) -> list[T]:
        """Run the functions interleaved, and return their results.

        `before_resume` is called with the index of a function each time before the function starts or continues. If a
        function raises an exception, all functions are stopped and the exception is reraised.
        """
        if len(functions) == 1:
            before_resume(0)
            return [functions[0]()]
        threads = [_FunctionThread(function, self._generators) for function in functions]
        try:
            replies = [
                self._resume_function(number, thread, _ContinueRequest(None, 0), before_resume)
                for number, thread in enumerate(threads)
            ]
            while waiting_replies := _collect_waiting_replies(replies):
                last = max(reply.sequence_number for reply in waiting_replies)
                computed = threads[-1].send_request(
                    _ComputeRequest(waiting_replies[0].joint, [reply.inputs for reply in waiting_replies], last)
                )
                assert isinstance(computed, _ComputedReply)
                replies = [
                    self._resume_function(
                        number, thread, _ContinueRequest(result, computed.sequence_number), before_resume
                    )
                    for number, (thread, result) in enumerate(zip(threads, computed.results, strict=True))
                ]
        finally:
            self._running = None
            for thread in threads:
                thread.stop()
        return [reply.result for reply in replies if isinstance(reply, _ReturnedReply)]

    def _resume_function(
        self,
        function_index: int,
        thread: "_FunctionThread",
        request: _ContinueRequest,
        before_resume: Callable[[int], None],
    ) -> _WaitingReply | _ReturnedReply:
        before_resume(function_index)
        self._running = thread
        reply = thread.send_request(request)
        assert isinstance(reply, _WaitingReply | _ReturnedReply)
        return reply


@final
class _FunctionThread:
    """Runs a function in a thread, controlled by requests: _ContinueRequest, _ComputeRequest, or None to stop it."""

    def __init__(self, function: Callable[[], Any], generators: Sequence[Generator]) -> None:
        self._function = function
        self._generators = generators
        self._requests: SimpleQueue[_ContinueRequest | _ComputeRequest | None] = SimpleQueue()
        self._replies: SimpleQueue[_WaitingReply | _ComputedReply | _ReturnedReply | BaseException] = SimpleQueue()
        # The grad mode and the current stream are thread-local, so the new thread must set them.
        self._grad_enabled = torch.is_grad_enabled()
        cuda = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._stream = torch.cuda.stream(torch.cuda.current_stream()) if cuda else nullcontext()
        self._thread = Thread(
            target=contextvars.copy_context().run, args=(self._run_thread,), name="cooperative", daemon=True
        )
        self._thread.start()

    def send_request(
        self, request: _ContinueRequest | _ComputeRequest
    ) -> _WaitingReply | _ComputedReply | _ReturnedReply:
        """Send a request to the thread and return its reply. If the function raised an exception, reraise it."""
        self._requests.put(request)
        reply = self._replies.get()
        if isinstance(reply, BaseException):
            raise reply
        return reply

    def wait_at(self, label: str, joint: JointFunction, inputs: Any) -> Any:
        """Wait until all functions reach the exchange, and return its result. Called in the thread of the function."""
        states = [generator.get_state() for generator in self._generators]
        self._replies.put(_WaitingReply(label, joint, inputs, _next_sequence_number()))
        while isinstance(request := self._requests.get(), _ComputeRequest):
            _advance_sequence_number(request.sequence_number)
            results = request.joint(request.inputs)
            self._replies.put(_ComputedReply(results, _next_sequence_number()))
        if request is None:
            raise _Cancellation
        _advance_sequence_number(request.sequence_number)
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)
        return request.result

    def stop(self) -> None:
        """Stop the function at its current or next exchange, and join the thread."""
        self._requests.put(None)
        self._thread.join()

    def _run_thread(self) -> None:
        if self._requests.get() is None:
            return
        try:
            with torch.set_grad_enabled(self._grad_enabled), self._stream:
                self._replies.put(_ReturnedReply(self._function()))
        except BaseException as error:
            self._replies.put(error)


class _Cancellation(BaseException):
    """Raised in a function to stop it. This is a BaseException, because the function may catch any Exception."""


def _collect_waiting_replies(replies: Sequence[_WaitingReply | _ReturnedReply]) -> list[_WaitingReply]:
    """Return the replies of all functions if they are waiting at the same exchange, or [] if all have returned.

    Raises UsageError if functions are waiting at different exchanges, or if only some of them have returned.
    """
    waiting_replies = [reply for reply in replies if isinstance(reply, _WaitingReply)]
    exchanges = [reply.label if isinstance(reply, _WaitingReply) else "its end" for reply in replies]
    if len(set(exchanges)) > 1:
        index = next(number for number, label in enumerate(exchanges) if label != exchanges[0])
        raise UsageError(
            f"a layer computes over all micro-batches of a step, so every micro-batch must go through the same layers "
            f"in the same order; the forward pass of one micro-batch has reached {exchanges[0]}, but the forward pass "
            f"of another micro-batch has reached {exchanges[index]}; make the order of layers independent of the "
            f"samples and of random numbers"
        )
    return waiting_replies


def _next_sequence_number() -> int:
    """Return the sequence number that autograd will assign to the next node of this thread."""
    return int(torch._C._autograd._get_sequence_nr())


def _advance_sequence_number(minimum: int) -> None:
    """Create and discard autograd nodes until the sequence number of the next node is at least `minimum`."""
    leaf = torch.zeros((), requires_grad=True)
    with torch.enable_grad():
        while _next_sequence_number() < minimum:
            leaf.view_as(leaf)
