"""How far a run is and in what state, by its events alone and by what is known beside them."""

import math
from typing import Any

import pytest
from event_examples import done, evaluated, saved, started, stepped, stopped

from lockstep.reporting.jsonl import figures
from lockstep.reporting.status import Status, state, status
from lockstep.training.events import Event


def log(*events: tuple[float, Event]) -> list[dict[str, Any]]:
    return [figures(event, time) for time, event in events]


def test_an_empty_log_says_nothing() -> None:
    assert status([]) == Status()


def test_before_the_first_report_there_is_a_length_and_no_speed() -> None:
    found = status(log((100.0, started())))
    assert (found.last, found.time, found.step, found.steps, found.epoch, found.epochs) == (
        "started",
        100.0,
        0,
        690,
        0,
        30,
    )
    assert (found.samples_per_s, found.left_s, found.loss, found.figure) == (None, None, None, None)


def test_figures_are_the_last_ones() -> None:
    found = status(log((100.0, started()), (110.0, stepped(23)), (111.0, evaluated()), (120.0, stepped(46, loss=0.25))))
    assert (found.last, found.step, found.epoch, found.loss) == ("step", 46, 2, 0.25)
    assert found.figure == ("top1", 355 / 360, True)


def test_an_epoch_begins_with_its_first_step() -> None:
    assert [status(log((0.0, started()), (1.0, stepped(step)))).epoch for step in (1, 23, 24)] == [1, 1, 2]


def test_speed_and_time_left_are_of_the_last_reports() -> None:
    slow = [(100.0 * step, stepped(step)) for step in range(1, 31)]
    fast = [(3000.0 + step, stepped(30 + step)) for step in range(1, 61)]
    found = status(log((0.0, started()), *slow, *fast))
    assert found.samples_per_s == 64.0
    assert found.left_s == 600.0


def test_evaluating_and_saving_count_as_time() -> None:
    found = status(log((0.0, started()), (10.0, stepped(10)), (50.0, evaluated()), (60.0, stepped(20))))
    assert found.left_s == (690 - 20) * 60.0 / 20


def test_a_run_that_went_on_counts_from_its_last_start() -> None:
    first = [(0.0, started()), (1.0, stepped(50)), (2.0, stepped(100))]
    found = status(log(*first, (90_000.0, started(step=46))))
    assert (found.step, found.samples_per_s, found.left_s) == (46, None, None)
    found = status(log(*first, (90_000.0, started(step=46)), (90_010.0, stepped(56))))
    assert (found.step, found.samples_per_s, found.left_s) == (56, 64.0, 634.0)


def test_a_clock_that_was_set_back_gives_no_speed() -> None:
    assert status(log((100.0, started()), (90.0, stepped(10)))).left_s is None


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_read(loss: float) -> None:
    found = status(log((0.0, started()), (1.0, stepped(1, loss=loss)))).loss
    assert repr(found) == repr(loss)


def test_an_event_of_another_version_does_no_harm() -> None:
    found = status([*log((0.0, started()), (1.0, stepped(10))), {"event": "rested", "time": 2.0, "step": 10}])
    assert (found.last, found.step, found.left_s) == ("rested", 10, 68.0)


def test_why_it_stopped_is_told() -> None:
    assert status(log((0.0, started()), (1.0, saved()), (1.0, stopped()))).reason == "SIGTERM"


TRAINING = status(log((0.0, started()), (100.0, stepped(10))))
STOPPED = status(log((0.0, started()), (100.0, stopped())))
DONE = status(log((0.0, started()), (100.0, done())))


@pytest.mark.parametrize(
    ("run", "held", "submitted", "job", "expected"),
    [
        (TRAINING, True, None, None, "running"),
        (TRAINING, False, None, None, "died"),
        (STOPPED, False, None, None, "saved"),
        (STOPPED, True, None, None, "running"),  # it goes on, and has not said so yet
        (DONE, True, None, None, "done"),
        (DONE, False, 200.0, "PENDING", "done"),
        (Status(), False, None, None, "died"),
        (Status(), True, None, None, "running"),
        # Nobody can be asked: what was submitted after the last event waits.
        (Status(), False, 50.0, None, "queued"),
        (STOPPED, False, 50.0, None, "saved"),
        (STOPPED, False, 150.0, None, "queued"),
        (TRAINING, False, 50.0, None, "died"),
        # Slurm knows.
        (Status(), False, 50.0, "PENDING", "queued"),
        (STOPPED, False, 50.0, "PENDING", "queued"),
        (STOPPED, False, 50.0, "RUNNING", "running"),
        (Status(), False, 50.0, "", "died"),
        (STOPPED, False, 150.0, "", "saved"),
        (STOPPED, False, 50.0, "COMPLETING", "saved"),
        (TRAINING, False, 50.0, "NODE_FAIL", "died"),
    ],
)
def test_states(run: Status, held: bool, submitted: float | None, job: str | None, expected: str) -> None:
    assert state(run, held, submitted, job) == expected
