"""All time goes to one activity or another, and that of the training to a core, the queue for one, or to waiting."""

import os
import time
from types import SimpleNamespace

import pytest
import torch

from lockstep.device import clock
from lockstep.device.clock import ActivityClock

CPU = torch.device("cpu")


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return a time that the test sets: by the clock, on a core, and in the queue for one, in seconds."""
    now = SimpleNamespace(wall=100.0, core=5.0, queue=7.0)
    monkeypatch.setattr(time, "perf_counter", lambda: now.wall)
    monkeypatch.setattr(time, "thread_time", lambda: now.core)
    monkeypatch.setattr(os, "pread", lambda *_: f"1 {round(now.queue * 1e9)} 3\n".encode())
    return now


def pass_time(now: SimpleNamespace, wall: float, core: float, queue: float) -> None:
    now.wall, now.core, now.queue = now.wall + wall, now.core + core, now.queue + queue


def test_each_second_goes_to_one_activity(now: SimpleNamespace) -> None:
    made = ActivityClock(CPU, "setting up", split_activity="training")
    pass_time(now, 2.0, 2.0, 0.0)
    made.start_activity("training")
    pass_time(now, 10.0, 5.0, 3.0)
    with made.track_activity("data"):
        pass_time(now, 4.0, 1.0, 0.0)
    pass_time(now, 1.0, 1.0, 0.0)
    assert made.get_activity_seconds() == {
        "setting up": 2.0,
        "computing": 6.0,
        "waiting for a core": pytest.approx(3.0),
        "waiting": pytest.approx(2.0),
        "data": 4.0,
    }
    made.close()
    made.close()


def test_an_error_ends_an_activity_too(now: SimpleNamespace) -> None:
    made = ActivityClock(CPU, "setting up", split_activity="training")
    with pytest.raises(ZeroDivisionError), made.track_activity("data"):
        raise ZeroDivisionError
    pass_time(now, 1.0, 1.0, 0.0)
    assert made.get_activity_seconds() == {"setting up": 1.0, "data": 0.0}
    made.close()


def test_on_a_card_the_training_is_not_divided(now: SimpleNamespace) -> None:
    made = ActivityClock(torch.device("cuda"), "training", split_activity="training")
    pass_time(now, 3.0, 3.0, 0.0)
    assert made.get_activity_seconds() == {"training": 3.0}
    assert made.get_split_seconds() == 3.0
    made.close()


def test_a_kernel_that_does_not_count_the_queue(now: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "_SCHEDSTAT", "/nowhere")
    made = ActivityClock(CPU, "training", split_activity="training")
    pass_time(now, 3.0, 1.0, 2.0)
    assert made.get_activity_seconds() == {"computing": 1.0, "waiting for a core": 0.0, "waiting": 2.0}
    assert made.get_split_seconds() == 3.0
    made.close()


def test_this_machine() -> None:
    """By the real clocks: who sleeps waits, who computes is on a core or in the queue for one."""
    made = ActivityClock(CPU, "training", split_activity="training")
    time.sleep(0.05)
    asleep = made.get_activity_seconds()
    end = time.thread_time() + 0.05
    while time.thread_time() < end:
        pass
    awake = made.get_activity_seconds()
    made.close()
    assert asleep["waiting"] > 0.04
    assert asleep["computing"] < 0.04
    assert awake["computing"] - asleep["computing"] > 0.04
