"""Charts are figures that plotly takes, and what runs are called is drawn as it stands."""

import json
import math

import pytest
from component import require_package

from lockstep.reporting.charts import Chart, bars, curves, lines
from lockstep.reporting.history import Point

POINTS = [Point(1, 64, 0.5, 2.0), Point(2, 128, 1.0, math.nan), Point(3, 192, 1.5, 1.0)]


def test_curves_over_samples_and_over_seconds() -> None:
    chart = curves("loss", {"a": POINTS}, "loss")
    [trace] = chart.figure["data"]
    assert trace["x"] == trace["meta"]["samples"] == [64, 128, 192]
    assert trace["meta"]["seconds"] == [0.5, 1.0, 1.5]
    assert trace["y"] == [2.0, None, 1.0]  # a gap, since JSON has no NaN
    assert chart.axes == ("samples", "seconds")
    json.dumps(chart.figure, allow_nan=False)


def test_no_two_of_32_lines_look_alike() -> None:
    chart = curves("loss", {f"run {number}": POINTS for number in range(32)}, "loss")
    assert len({json.dumps(trace["line"]) for trace in chart.figure["data"]}) == 32


def test_a_long_curve_keeps_its_ends_and_its_spikes() -> None:
    points = [Point(n, 64 * n, float(n), 9.0 if n == 77_777 else 1.0) for n in range(100_000)]
    [trace] = curves("loss", {"a": points}, "loss").figure["data"]
    assert len(trace["x"]) < 3_000
    assert (trace["x"][0], trace["x"][-1]) == (0, 64 * 99_999)
    assert max(trace["y"]) == 9.0
    assert trace["x"] == sorted(trace["x"])


def test_names_are_text() -> None:
    name = '<a href="https://example.org">x</a> & <b>'
    escaped = '&lt;a href="https://example.org"&gt;x&lt;/a&gt; &amp; &lt;b&gt;'
    assert curves("t", {name: POINTS}, "y").figure["data"][0]["name"] == escaped
    assert lines("t", "x", "y", {name: [(1, 2)]}).figure["data"][0]["name"] == escaped
    [trace] = bars("t", "x", {name: [1.0]}, [name]).figure["data"]
    assert (trace["name"], trace["y"]) == (escaped, [escaped])


@pytest.mark.parametrize(
    "chart",
    [
        curves("t", {"a": POINTS}, "y", percent=True),
        lines("t", "x", "y", {"a": [(1, 2.0), (2, math.inf)], "ideal": [(1, 1.0), (2, 2.0)]}, ideal="ideal"),
        bars("t", "x", {"a": [1.0, 2.0], "b": [3.0, 4.0]}, ["one", "two"]),
        bars("t", "x", {"a": [1.0]}, ["one"], stacked=False),
    ],
)
def test_plotly_knows_all_that_is_said(chart: Chart) -> None:
    require_package("plotly")
    from plotly.graph_objects import Figure

    Figure(chart.figure)  # it refuses what it does not know
    with pytest.raises(ValueError, match="unknown"):
        Figure({"data": [{"type": "scatter", "unknown": 1}]})
