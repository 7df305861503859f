"""A run by its log: curves over steps, samples and seconds, also of a run that was resumed, or of a log that lies."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from event_examples import SHA, done, evaluated, saved, started, stepped

from lockstep.reporting.curves import curves
from lockstep.reporting.history import by_rank, history, peaks
from lockstep.reporting.jsonl import figures
from lockstep.reporting.thinning import Point
from lockstep.training.events import Event, Logged


def logged(*events: tuple[Event, float]) -> list[dict[str, Any]]:
    """Return the lines of a log."""
    return [json.loads(json.dumps(figures(event, time))) for event, time in events]


def test_a_run_from_its_start_to_its_end() -> None:
    found = history(
        logged((started(), 100.0), (stepped(10), 103.0), (evaluated(), 104.0), (saved(), 105.0), (done(), 106.0))
    )
    assert found.curves["loss/train"] == [Point(10, 640, 3.0, 0.43214)]
    assert found.curves["loss/validation"] == [Point(69, 4311, 4.0, 0.1023)]
    assert found.last_of("top1") == 355 / 360
    assert found.last_of("nothing") is None
    assert (found.seconds, found.weights_sha256, found.monitor) == (6.0, SHA, "top1")
    assert found.fractions == {"top1", "top5"}
    assert [(save.step, save.took_s, save.best) for save in found.saves] == [(690, 0.1, True)]
    assert [(start.processes, start.strategy, start.resumed) for start in found.starts] == [(1, "single", False)]


def test_the_names_are_those_of_the_other_sinks() -> None:
    step = replace(stepped(), figures={"top1": 0.5, "mae": 2.0}, loss_scale=8.0, flops_per_s=1e9, mfu=0.5)
    for event in (step, evaluated(), replace(evaluated(), weights="ema")):
        found = history(logged((started(), 0.0), (event, 1.0)))
        named = {name: points[-1].value for name, points in found.curves.items() if name != "peak_bytes"}
        assert named == curves(event)
    own = Logged(step=3, epoch=0, samples=192, figures={"accuracy": 0.75})
    assert history(logged((started(), 0.0), (own, 1.0))).last_of("accuracy") == 0.75


def test_steps_that_are_recomputed_count_once_and_pauses_not_at_all() -> None:
    found = history(
        logged(
            (started(), 100.0),
            (stepped(10, 1.0), 110.0),
            (stepped(20, 2.0), 120.0),
            (started(10, "runs/x"), 500.0),
            (stepped(20, 3.0), 505.0),
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
    [line] = logged((last, 1.0))
    assert (by_rank(line), peaks(line)) == ({"data": [1.0, 2.0]}, [10.0, 20.0])
    [line] = logged((done(), 1.0))
    assert (by_rank(line), peaks(line)) == ({}, [])


def test_what_is_not_finite_stays_so() -> None:
    found = history(logged((started(), 0.0), (stepped(1, math.nan), 1.0)))
    assert math.isnan(found.curves["loss/train"][0].value)


def test_a_log_that_lies_harms_nothing(tmp_path: Path) -> None:
    bad = [
        {},
        {"event": "step"},
        {"event": ["step"], "time": 1, "step": 1, "samples": 1},
        {"event": "started", "time": -5, "step": 0, "samples": 0},
        {"event": "started", "time": 5, "step": 0, "samples": 0, "strategy": 7, "fractions": 3, "monitor": []},
        {"event": "step", "time": 6, "step": 1, "samples": 1, "loss": [1], "lr": True, "x\x1b[2J": 1, "big": 10**400},
        {"event": "saved", "time": 7, "step": 1, "samples": 1, "seconds": "long"},
        {"event": "done", "time": 8, "step": 1, "samples": 1, "seconds_by_rank": {"a": [1], "b": [1, 2]}},
    ]
    found = history(bad)
    assert list(found.curves) == [r"x\x1b[2J/train"]
    assert (found.monitor, found.fractions, found.starts[0].strategy) == ("loss", frozenset(), "")
    assert (found.saves[0].took_s, by_rank(found.last), found.seconds) == (0.0, {}, 3.0)
    many = {"event": "logged", "time": 1, "step": 1, "samples": 1, **{f"figure {number}": 1 for number in range(500)}}
    assert len(history([many]).curves) == 100
