"""A run by its log: how far it is, curves over steps, samples and seconds, also of a run that was resumed."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from event_examples import SHA, done, evaluated, saved, started, stepped, stopped
from view_examples import logged

from lockstep.reporting.curves import select_metrics
from lockstep.reporting.run_log import (
    RunLog,
    RunStatus,
    build_history,
    describe_best_run,
    get_peak_bytes_by_rank,
    get_seconds_by_rank,
)
from lockstep.reporting.thinning import Point
from lockstep.training.events import Event, Logged


def test_a_run_from_its_start_to_its_end() -> None:
    found = build_history(
        logged((100.0, started()), (103.0, stepped(10)), (104.0, evaluated()), (105.0, saved()), (106.0, done()))
    )
    assert found.curves["loss/train"] == [Point(10, 640, 3.0, 0.43214)]
    assert found.curves["loss/validation"] == [Point(69, 4311, 4.0, 0.1023)]
    assert found.get_last_value("top1") == 355 / 360
    assert found.get_last_value("nothing") is None
    assert (found.seconds, found.weights_sha256, found.monitor) == (6.0, SHA, "top1")
    assert found.fractions == {"top1", "top5"}
    assert [(save.step, save.duration_s, save.best) for save in found.saves] == [(690, 0.1, True)]
    assert [(start.processes, start.strategy, start.resumed) for start in found.starts] == [(1, "single", False)]


@pytest.mark.parametrize(
    ("how", "figures", "marks"),
    [
        ({}, (0.5, 0.75, math.nan), ["", "by top1", ""]),
        ({"monitor": "loss", "higher": False}, (0.5, 0.75, 0.25), ["", "", "by loss"]),
        ({}, (0.5, 0.5), ["", ""]),
        ({"higher": None}, (0.5, 0.75), ["", ""]),  # an older log
    ],
)
def test_the_best_of_runs_by_what_they_are_judged(
    how: dict[str, Any], figures: Sequence[float], marks: list[str]
) -> None:
    ends = [replace(evaluated(), figures={"top1": each, "top5": 1.0}, loss=each) for each in figures]
    runs = [build_history(logged((0.0, replace(started(), **how)), (1.0, each))) for each in ends]
    assert describe_best_run(runs) == marks
    assert {run.metric and run.metric.name for run in runs} == {"top1"}  # the task's first where the loss decides


def test_runs_on_datasets_of_different_sizes_have_no_best() -> None:
    ends = [replace(evaluated(), figures={"top1": each, "top5": 1.0}) for each in (0.5, 0.75)]
    starts = [started(), replace(started(), validation_samples=359)]
    runs = [build_history(logged((0.0, start), (1.0, end))) for start, end in zip(starts, ends, strict=True)]
    assert describe_best_run(runs) == ["", ""]


def test_the_names_are_those_of_the_other_sinks() -> None:
    step = replace(stepped(), figures={"top1": 0.5, "mae": 2.0}, loss_scale=8.0, flops_per_s=1e9, mfu=0.5)
    for event in (step, evaluated(), replace(evaluated(), weights="ema")):
        found = build_history(logged((0.0, started()), (1.0, event)))
        named = {name: points[-1].value for name, points in found.curves.items() if name != "peak_bytes"}
        assert named == select_metrics(event)
    own = Logged(step=3, epoch=0, samples=192, figures={"accuracy": 0.75})
    assert build_history(logged((0.0, started()), (1.0, own))).get_last_value("accuracy") == 0.75


def test_steps_that_are_recomputed_count_once_and_pauses_not_at_all() -> None:
    found = build_history(
        logged(
            (100.0, started()),
            (110.0, stepped(10, 1.0)),
            (120.0, stepped(20, 2.0)),
            (500.0, started(10, "runs/x")),
            (505.0, stepped(20, 3.0)),
        )
    )
    assert [(point.step, point.seconds, point.value) for point in found.curves["loss/train"]] == [
        (10, 10.0, 1.0),
        (20, 25.0, 3.0),
    ]
    assert [(start.step, start.seconds, start.resumed) for start in found.starts] == [(0, 0.0, False), (10, 20.0, True)]
    assert found.seconds == 25.0
    assert found.weights_sha256 == ""


def test_where_seconds_and_memory_went() -> None:
    last = replace(done(), seconds_by_rank={"data": [1.0, 2.0]}, peak_bytes_by_rank=[10, 20])
    [line] = logged((1.0, last))
    assert (get_seconds_by_rank(line), get_peak_bytes_by_rank(line)) == ({"data": [1.0, 2.0]}, [10.0, 20.0])
    [line] = logged((1.0, done()))
    assert (get_seconds_by_rank(line), get_peak_bytes_by_rank(line)) == ({}, [])


def test_events_that_are_none_of_this_version_are_refused_and_change_nothing() -> None:
    log = RunLog()
    for event in logged((5.0, started()), (6.0, stepped(1))):
        log.add(event)
    before = log.make_history()
    for forged in (
        {"event": "step"},
        {"event": ["step"], "time": 1, "step": 1, "samples": 1},
        {"event": "started", "time": -5, "step": 0, "samples": 0},
        {"event": "started", "time": 5, "step": 0, "samples": 0, "monitor": []},
        {"event": "step", "time": 6, "step": 1, "samples": 1, "loss": [1]},
        {"event": "stopped", "time": 6, "step": 1, "samples": 1, "reason": 1},
        {"event": "saved", "time": 1e300, "step": 1, "samples": 1},
    ):
        with pytest.raises((KeyError, ValueError)):
            log.add(forged)
    assert log.make_history() == before


def test_a_log_that_lies_harms_nothing() -> None:
    found = build_history(
        [
            {},
            {"event": "started", "time": 5, "step": 0, "samples": 0, "strategy": 7, "fractions": 3},
            {"event": "step", "time": 6, "step": 1, "samples": 1, "loss": 1, "lr": True, "x\x1b[2J": 1, "big": 10**400},
            {"event": "saved", "time": 7, "step": 1, "samples": 1, "seconds": "long"},
            {"event": "done", "time": 8, "step": 1, "samples": 1, "seconds_by_rank": {"a": [1], "b": [1, 2]}},
        ]
    )
    assert list(found.curves) == ["loss/train", r"x\x1b[2J/train"]
    assert (found.monitor, found.fractions, found.starts[0].strategy) == ("loss", frozenset(), "")
    assert (found.saves[0].duration_s, get_seconds_by_rank(found.last), found.seconds) == (0.0, {}, 3.0)
    many = {"event": "logged", "time": 1, "step": 1, "samples": 1, **{f"figure {number}": 1 for number in range(500)}}
    assert len(build_history([many]).curves) == 100


def status(*events: tuple[float, Event]) -> RunStatus:
    return build_history(logged(*events)).status


def test_before_the_first_report_there_is_a_length_and_no_speed() -> None:
    found = status((100.0, started()))
    assert found == RunStatus("started", 100.0, step=0, steps=690, epoch=0, epochs=30)


def test_figures_are_the_last_ones() -> None:
    found = status((100.0, started()), (110.0, stepped(23)), (111.0, evaluated()), (120.0, stepped(46, loss=0.25)))
    assert (found.last, found.step, found.epoch, found.loss) == ("step", 46, 2, 0.25)
    assert found.figure == ("top1", 355 / 360, True)


def test_an_epoch_begins_with_its_first_step() -> None:
    assert [status((0.0, started()), (1.0, stepped(step))).epoch for step in (1, 23, 24)] == [1, 1, 2]


def test_speed_and_time_left_are_of_the_last_reports() -> None:
    slow = [(100.0 * step, stepped(step)) for step in range(1, 31)]
    fast = [(3000.0 + step, stepped(30 + step)) for step in range(1, 61)]
    found = status((0.0, started()), *slow, *fast)
    assert found.samples_per_s == 64.0
    assert found.left_s == 600.0


def test_evaluating_and_saving_count_as_time() -> None:
    found = status((0.0, started()), (10.0, stepped(10)), (50.0, evaluated()), (60.0, stepped(20)))
    assert found.left_s == (690 - 20) * 60.0 / 20


def test_a_run_that_went_on_counts_from_its_last_start() -> None:
    first = [(0.0, started()), (1.0, stepped(50)), (2.0, stepped(100))]
    found = status(*first, (90_000.0, started(step=46)))
    assert (found.step, found.samples_per_s, found.left_s) == (46, None, None)
    found = status(*first, (90_000.0, started(step=46)), (90_010.0, stepped(56)))
    assert (found.step, found.samples_per_s, found.left_s) == (56, 64.0, 634.0)


def test_a_clock_that_was_set_back_gives_no_speed() -> None:
    assert status((100.0, started()), (90.0, stepped(10))).left_s is None


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_read(loss: float) -> None:
    found = build_history(logged((0.0, started()), (1.0, stepped(1, loss=loss))))
    assert repr(found.status.loss) == repr(found.curves["loss/train"][0].value) == repr(loss)


def test_an_event_of_another_version_does_no_harm() -> None:
    other = {"event": "rested", "time": 2.0, "step": 10}
    found = build_history([*logged((0.0, started()), (1.0, stepped(10))), other]).status
    assert (found.last, found.step, found.left_s) == ("rested", 10, 68.0)


def test_why_it_stopped_is_told() -> None:
    assert status((0.0, started()), (1.0, saved()), (1.0, stopped())).reason == "SIGTERM"
