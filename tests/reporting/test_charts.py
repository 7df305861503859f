"""Charts are figures that plotly takes, and what runs are called is drawn as it stands."""

import json
import math

import pytest

from lockstep.reporting.charts import (
    Chart,
    make_bar_chart,
    make_curve_chart,
    make_line_chart,
    make_matrix_chart,
    make_scatter_chart,
)
from lockstep.reporting.thinning import Point

POINTS = [Point(1, 64, 0.5, 2.0), Point(2, 128, 1.0, math.nan), Point(3, 192, 1.5, 1.0)]


def test_curves_over_samples_and_over_seconds() -> None:
    chart = make_curve_chart("loss", {"a": POINTS}, "loss")
    [trace] = chart.figure["data"]
    assert trace["x"] == trace["meta"]["samples"] == [64, 128, 192]
    assert trace["meta"]["seconds"] == [0.5, 1.0, 1.5]
    assert trace["y"] == [2.0, None, 1.0]  # a gap, since JSON has no NaN
    assert chart.axes == ("samples", "seconds")
    json.dumps(chart.figure, allow_nan=False)


def test_an_axis_of_one_value_begins_at_zero() -> None:
    layout = make_curve_chart("flops_per_s", {"a": [Point(8, 128, 15.0, 2556386947.84)]}, "flops_per_s").figure[
        "layout"
    ]
    assert (layout["xaxis"]["rangemode"], layout["yaxis"]["rangemode"]) == ("tozero", "tozero")
    assert "rangemode" not in make_curve_chart("loss", {"a": POINTS}, "loss").figure["layout"]["yaxis"]


def test_training_is_drawn_thin_beside_validation_in_one_color() -> None:
    chart = make_curve_chart("loss", {"a": POINTS, "b": POINTS}, "loss", training={"b": POINTS, "c": POINTS})
    drawn = {trace["name"]: trace["line"] for trace in chart.figure["data"]}
    assert chart.legend == "runs"
    assert not chart.figure["layout"]["showlegend"]  # the page has one
    assert [*drawn] == ["a, validation", "b, training", "b, validation", "c, training"]
    assert drawn["b, training"] == {**drawn["b, validation"], "width": 1}
    assert len({line["color"] for line in drawn.values()}) == 3


def test_no_two_of_32_lines_look_alike() -> None:
    chart = make_curve_chart("loss", {f"run {number}": POINTS for number in range(32)}, "loss")
    assert len({json.dumps(trace["line"]) for trace in chart.figure["data"]}) == 32


def test_the_color_of_a_name_depends_on_its_place_in_the_page_alone() -> None:
    names = ["a", "b", "c"]
    chart = make_curve_chart("loss", {"c": POINTS, "b": POINTS}, "loss", names=names)
    same = make_line_chart("by position", "x", "y", {"c": [(1, 2.0)]}, names=names, legend="runs")
    found = [(trace["meta"]["name"], trace["meta"]["place"], trace["line"]) for trace in chart.figure["data"]]
    assert [(name, place) for name, place, _ in found] == [("b", 1), ("c", 2)]
    assert same.figure["data"][0]["line"] == found[1][2]
    assert found[0][2] != found[1][2]


def test_percentages_and_rates_begin_at_zero() -> None:
    modes = [
        make_curve_chart("t", {"a": POINTS}, "y", percent=percent, from_zero=from_zero)
        .figure["layout"]["yaxis"]
        .get("rangemode")
        for percent, from_zero in ((True, False), (False, True), (False, False))
    ]
    assert modes == ["tozero", "tozero", None]


def test_a_legend_of_one_name_or_of_repeated_colors_is_left_out() -> None:
    shown = [
        make_bar_chart("t", "x", {f"rank {rank}": [1.0] for rank in range(ranks)}, ["a"], stacked=False).figure[
            "layout"
        ]
        for ranks in (1, 8, 9)
    ]
    assert [layout["showlegend"] for layout in shown] == [False, True, False]


def test_names_are_text() -> None:
    name = '<a href="https://example.org">x</a> & <b>'
    escaped = '&lt;a href="https://example.org"&gt;x&lt;/a&gt; &amp; &lt;b&gt;'
    assert make_curve_chart("t", {name: POINTS}, "y").figure["data"][0]["name"] == escaped
    assert make_line_chart("t", "x", "y", {name: [(1, 2)]}).figure["data"][0]["name"] == escaped
    [trace] = make_bar_chart("t", "x", {name: [1.0]}, [name]).figure["data"]
    assert (trace["name"], trace["y"]) == (escaped, [escaped])


def test_a_matrix_has_each_count_once_on_its_diagonal_or_beside_it() -> None:
    chart = make_matrix_chart("t", "guess", "truth", ["<a>", "b" * 30], [[30, 10], [0, 12_345]])
    right, wrong = chart.figure["data"]
    assert (right["z"], wrong["z"]) == ([[0.75, None], [None, 1.0]], [[None, 0.25], [None, None]])
    assert (right["text"], wrong["text"]) == ([["30", ""], ["", "12.3k"]], [["", "10"], ["", ""]])
    assert (right["zmax"], wrong["zmax"]) == (1, 0.25)  # few mistakes have all shades, too
    assert right["hovertext"][0][1] == f"truth &lt;a&gt;, guess {'b' * 30}: 10"
    assert chart.figure["layout"]["xaxis"]["ticktext"] == ["&lt;a&gt;", "b" * 15 + "…"]


@pytest.mark.parametrize(
    ("count", "shown"),
    [(9_999, "9999"), (10_000, "10k"), (999_499, "999k"), (999_501, "1M"), (1_234_567, "1.23M"), (2 * 10**9, "2G")],
)
def test_large_counts_have_room_in_a_cell(count: int, shown: str) -> None:
    assert make_matrix_chart("t", "x", "y", ["a"], [[count]]).figure["data"][0]["text"] == [[shown]]


def test_dots_and_where_they_would_be_equal() -> None:
    points, equal = make_scatter_chart("t", "x", "y", [(1.0, 2.0), (math.inf, 1.0), (4.0, 3.0)]).figure["data"]
    assert (points["x"], points["y"]) == ([1.0, 4.0], [2.0, 3.0])
    assert equal["x"] == equal["y"] == [1.0, 4.0]


def test_lines_over_many_places_have_no_tick_for_each_and_need_not_begin_at_zero() -> None:
    few, many = ([(float(place), 5.0) for place in range(count)] for count in (16, 100))
    layouts = [make_line_chart("t", "x", "y", {"a": each}, from_zero=False).figure["layout"] for each in (few, many)]
    assert ["tickvals" in layout["xaxis"] for layout in layouts] == [True, False]
    assert layouts[1]["yaxis"]["rangemode"] == "normal"
    assert make_line_chart("t", "x", "y", {"a": many}).figure["layout"]["yaxis"]["rangemode"] == "tozero"


@pytest.mark.parametrize(
    "chart",
    [
        make_curve_chart("t", {"a": POINTS}, "y", training={"a": POINTS}, percent=True),
        make_line_chart("t", "x", "y", {"a": [(1, 2.0), (2, math.inf)], "ideal": [(1, 1.0), (2, 2.0)]}, ideal="ideal"),
        make_bar_chart("t", "x", {"a": [1.0, 2.0], "b": [3.0, 4.0]}, ["one", "two"]),
        make_bar_chart("t", "x", {"a": [1.0]}, ["one"], stacked=False),
        make_matrix_chart("t", "x", "y", ["one", "two"], [[3, 1], [0, 0]]),
        make_scatter_chart("t", "x", "y", [(1.0, 2.0), (math.nan, 1.0)]),
    ],
)
def test_plotly_knows_all_that_is_said(chart: Chart) -> None:
    from plotly.graph_objects import Figure

    Figure(chart.figure)  # it refuses what it does not know
    with pytest.raises(ValueError, match="unknown"):
        Figure({"data": [{"type": "scatter", "unknown": 1}]})
