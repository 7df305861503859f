"""The clocks of this host run forwards; one that does not is counted."""

import time
from itertools import count

import pytest

from lockstep.device import timekeeping


def test_the_clocks_here_run() -> None:
    found = timekeeping.clock()
    assert found["backwards"] == 0
    assert abs(found["drift"]) < 0.5
    assert 0 < found["reading_ns"] < 1e6
    assert found["synchronised"] in (None, False, True)


def test_a_clock_that_runs_backwards_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = count()
    monkeypatch.setattr(time, "monotonic_ns", lambda: 10 * (tick := next(ticks)) - 25 * (tick % 10_000 == 9_999))
    assert timekeeping.clock()["backwards"] == 2


def test_a_clock_of_the_day_that_is_fast_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 2 * time.monotonic())
    assert timekeeping.clock()["drift"] == pytest.approx(1.0, abs=0.05)
