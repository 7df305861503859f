"""Speed is samples, and what they weigh, over seconds since the last look; memory is the most that was held."""

import resource
import time
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lockstep.device.meter import SpeedMeter


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    return clock


def test_samples_and_weight_over_seconds_since_the_last_read(clock: SimpleNamespace) -> None:
    meter = SpeedMeter(torch.device("cpu"))
    meter.add_step(30, 3000)
    meter.add_step(10, 200)
    clock.now += 4.0
    assert meter.read() == (10.0, 800.0, 0.0)
    meter.add_step(6, 6)
    clock.now += 2.0
    assert meter.read() == (3.0, 3.0, 0.0)


def test_what_is_not_training_is_left_out(clock: SimpleNamespace) -> None:
    meter = SpeedMeter(torch.device("cpu"))
    clock.now += 50.0
    meter.restart()
    meter.add_step(8, 16)
    clock.now += 2.0
    assert meter.read() == (4.0, 8.0, 0.0)


def test_nothing_trained_is_no_speed(clock: SimpleNamespace) -> None:
    assert SpeedMeter(torch.device("cpu")).read() == (0.0, 0.0, 0.0)  # no time has passed either


def test_waiting_for_data_is_a_mean_over_the_steps(clock: SimpleNamespace) -> None:
    def data() -> Iterator[int]:
        for number, seconds in enumerate((1.0, 2.0)):
            clock.now += seconds
            yield number
        clock.now += 8.0  # the end of the data belongs to no step

    meter = SpeedMeter(torch.device("cpu"))
    seen = []
    for number in meter.measure_data_waits(data()):
        seen.append(number)
        clock.now += 4.0  # the step itself
        meter.add_step(6, 6)
        if number == 1:
            assert meter.read() == (12 / 11.0, 12 / 11.0, 1.5)
    assert seen == [0, 1]
    meter.add_step(2, 2)
    clock.now += 1.0
    assert meter.read().data_s == 0.0


def test_peak_memory_is_in_bytes() -> None:
    meter = SpeedMeter(torch.device("cpu"))
    held = np.ones(60_000_000, np.uint8)
    assert meter.get_peak_bytes() >= held.nbytes
    assert meter.get_peak_bytes() == resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
