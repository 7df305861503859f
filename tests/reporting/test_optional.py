"""A sink that fails is off: said once, let go of, and no matter to the others."""

import random
from typing import Any

import pytest
from event_examples import started, stepped, write

from lockstep.reporting.optional import OptionalSink


class Fragile:
    def __init__(self, fails_at: str, error: BaseException) -> None:
        self.calls: list[str] = []
        self._fails_at = fails_at
        self._error = error

    def write(self, event: Any, time: float) -> None:
        self._call(event.name)

    def close(self) -> None:
        self._call("close")

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name == self._fails_at:
            raise self._error


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SystemExit(3), RuntimeError("no route")])
def test_after_an_error_it_is_closed_and_gets_nothing_more(error: BaseException) -> None:
    inner, said = Fragile("step", error), []
    sink = OptionalSink("sink mine:Sink", inner, said.append)
    write(sink, started(), stepped(), stepped())
    assert inner.calls == ["started", "step", "close"]
    (warning,) = said
    assert warning.startswith(f"warning: sink mine:Sink: {type(error).__name__}")
    assert warning.endswith("the sink is off, and the run continues without it")


def test_an_error_in_close_is_said_once_too() -> None:
    inner, said = Fragile("close", RuntimeError("late")), []
    sink = OptionalSink("sink mine:Sink", inner, said.append)
    write(sink, started())
    assert inner.calls == ["started", "close"]
    assert len(said) == 1


def test_one_that_works_says_nothing() -> None:
    inner, said = Fragile("", RuntimeError()), []
    sink = OptionalSink("sink mine:Sink", inner, said.append)
    write(sink, started())
    assert (inner.calls, said) == (["started", "close"], [])


def test_ctrl_c_is_no_failure_of_a_sink() -> None:
    sink = OptionalSink("sink mine:Sink", Fragile("started", KeyboardInterrupt()), [].append)
    with pytest.raises(KeyboardInterrupt):
        sink.write(started(), 1.0)


def test_what_a_sink_draws_is_not_seen_by_the_loop() -> None:
    class Drawing:
        def write(self, event: Any, time: float) -> None:
            random.random()

        def close(self) -> None:
            random.seed(0)

    drawn = random.getstate()
    write(OptionalSink("sink mine:Sink", Drawing(), [].append), started(), stepped())
    assert random.getstate() == drawn
