"""Functions that go through exchanges together: at each one a function waits until all have come to it.

The forwards of several micro-batches in one process are such functions, where a layer computes over all of them. Each
has a thread of its own, but one alone runs at any time, and which one is a matter of their order alone:

    caller       GoOn        GoOn        Compute       GoOn        GoOn
                  |           |             |           |           |
    thread 0     runs       waits         waits        runs       waits         until the next exchange,
    thread 1     waits      runs        computes       waits      runs          or its end
                  |           |             |           |           |
    caller       Came        Came        Computed      Came        Came

1. One after the other runs, from where it stopped, to its next exchange. The generators are set to what it left in
   them, so each draws the random numbers that it would draw alone.
2. All must have come to the same place. The last one computes the results of all, from what all have given. So autograd
   records one node with the inputs of all, and one backward goes through all graphs: on CUDA one thread does that, and
   could not wait for another backward in the middle of its own.
3. Each goes on with its own result.

A backward visits nodes by their sequence numbers, the last one made first, and in that order the gradients of what is
used several times are added. Each thread counts its nodes by itself. So at each exchange the counts are made equal: in
the joint backward the nodes of one function then have the order that they have alone, and its gradients the same bits.
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

Joint = Callable[[Sequence[Any]], Sequence[Any]]  # from what all functions give to what each of them gets


class _Came(NamedTuple):
    """A function has come to an exchange, having made so many nodes."""

    place: str
    joint: Joint
    given: Any
    nodes: int


class _Computed(NamedTuple):
    results: Sequence[Any]
    nodes: int


class _Ended(NamedTuple):
    result: Any


class _Compute(NamedTuple):
    """The order to compute what all get, with no fewer nodes made than any has made."""

    joint: Joint
    given: Sequence[Any]
    nodes: int


class _GoOn(NamedTuple):
    """The order to run on, with what the exchange has resulted in."""

    result: Any
    nodes: int


@final
class Cooperative:
    """Runs functions together, of which each may call `exchange`; what they draw comes from `generators`."""

    def __init__(self, generators: Sequence[Generator]) -> None:
        self._generators = generators
        self._running: _Part | None = None  # the function that runs now, where there are several

    @property
    def under_way(self) -> bool:
        """Whether several functions are."""
        return self._running is not None

    def exchange(self, place: str, joint: Joint, given: Any) -> Any:
        """Return this function's part of what `joint` makes of what all functions give, in their order.

        All functions come to the same places in the same order. A function that is alone need not wait.
        """
        return joint([given])[0] if self._running is None else self._running.come(place, joint, given)

    def run(self, functions: Sequence[Callable[[], T]], before: Callable[[int], None]) -> list[T]:
        """Return what the functions return; `before` is called with the number of each whenever it is to run on.

        What one of them raises ends all of them, and is raised here.
        """
        if len(functions) == 1:
            before(0)
            return [functions[0]()]
        parts = [_Part(function, self._generators) for function in functions]
        try:
            news = [self._go_on(number, each, _GoOn(None, 0), before) for number, each in enumerate(parts)]
            while came := _at_one_place(news):
                last = max(each.nodes for each in came)
                found = parts[-1].obey(_Compute(came[0].joint, [each.given for each in came], last))
                assert isinstance(found, _Computed)
                news = [
                    self._go_on(number, each, _GoOn(result, found.nodes), before)
                    for number, (each, result) in enumerate(zip(parts, found.results, strict=True))
                ]
        finally:
            self._running = None
            for each in parts:
                each.end()
        return [each.result for each in news if isinstance(each, _Ended)]

    def _go_on(self, number: int, part: "_Part", order: _GoOn, before: Callable[[int], None]) -> _Came | _Ended:
        before(number)
        self._running = part
        news = part.obey(order)
        assert isinstance(news, _Came | _Ended)
        return news


@final
class _Part:
    """One function in its thread, which waits for orders: it has one to run, or to compute, or None to end."""

    def __init__(self, function: Callable[[], Any], generators: Sequence[Generator]) -> None:
        self._function = function
        self._generators = generators
        self._orders: SimpleQueue[_GoOn | _Compute | None] = SimpleQueue()
        self._news: SimpleQueue[_Came | _Computed | _Ended | BaseException] = SimpleQueue()
        # What torch keeps for each thread is not that of the caller by itself.
        self._grad = torch.is_grad_enabled()
        cuda = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._stream = torch.cuda.stream(torch.cuda.current_stream()) if cuda else nullcontext()
        self._thread = Thread(target=contextvars.copy_context().run, args=(self._body,), name="together", daemon=True)
        self._thread.start()

    def obey(self, order: _GoOn | _Compute) -> _Came | _Computed | _Ended:
        """Let the function run or compute, and return how that ended; raise what it raised."""
        self._orders.put(order)
        news = self._news.get()
        if isinstance(news, BaseException):
            raise news
        return news

    def come(self, place: str, joint: Joint, given: Any) -> Any:
        """Wait in an exchange for its result; called in the thread."""
        states = [each.get_state() for each in self._generators]
        self._news.put(_Came(place, joint, given, _nodes()))
        while isinstance(order := self._orders.get(), _Compute):
            _make_nodes(order.nodes)
            results = order.joint(order.given)
            self._news.put(_Computed(results, _nodes()))
        if order is None:
            raise _Over
        _make_nodes(order.nodes)
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)
        return order.result

    def end(self) -> None:
        """End the function where it waits, or at its next exchange, and wait for that."""
        self._orders.put(None)
        self._thread.join()

    def _body(self) -> None:
        if self._orders.get() is None:
            return
        try:
            with torch.set_grad_enabled(self._grad), self._stream:
                self._news.put(_Ended(self._function()))
        except BaseException as error:
            self._news.put(error)


class _Over(BaseException):
    """Ends a function whose results nobody wants. No Exception: its own code may catch those."""


def _at_one_place(news: Sequence[_Came | _Ended]) -> list[_Came]:
    """Return the exchange to which all have come, or nothing where all have ended; UsageError where they differ."""
    came = [each for each in news if isinstance(each, _Came)]
    places = [each.place if isinstance(each, _Came) else "its end" for each in news]
    if len(set(places)) > 1:
        odd = next(number for number, place in enumerate(places) if place != places[0])
        raise UsageError(
            f"the forward of one micro-batch has come to {places[0]}, and that of another to {places[odd]}: what "
            f"computes over all micro-batches of a step needs each of them to go through the same layers in the same "
            f"order; let the model's way not depend on the samples or on chance"
        )
    return came


def _nodes() -> int:
    """Return the number that the next node gets which this thread makes."""
    return int(torch._C._autograd._get_sequence_nr())


def _make_nodes(count: int) -> None:
    """Make nodes that nobody keeps, until the next one gets at least this number."""
    leaf = torch.zeros((), requires_grad=True)
    with torch.enable_grad():
        while _nodes() < count:
            leaf.view_as(leaf)
