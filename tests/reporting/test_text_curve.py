"""A curve in blocks: its shape, stretches without a point, and figures that are not finite."""

import math

import pytest

from lockstep.reporting.text_curve import draw_text_curve
from lockstep.reporting.thinning import Point


def points(*values: float) -> list[Point]:
    return [Point(n, 64 * n, float(n), value) for n, value in enumerate(values)]


def test_a_line_from_the_lowest_to_the_highest() -> None:
    assert draw_text_curve(points(*range(8)), 8, 1) == ["▁▂▃▄▅▆▇█"]


def test_the_highest_fills_all_lines_and_the_lowest_an_eighth() -> None:
    assert draw_text_curve(points(0, 1, 0.5), 3, 2) == [" █▁", "▁██"]
    top, *_, bottom = draw_text_curve(points(0, 1), 2, 6)
    assert (top, bottom) == (" █", "▁█")


def test_a_column_has_the_mean_of_its_points_and_one_without_what_is_left_of_it() -> None:
    assert draw_text_curve(points(0, 2, 1, 1, 8, 8), 2, 1) == ["▁█"]
    assert draw_text_curve(points(0, 7), 4, 1) == ["▁▁▁█"]


@pytest.mark.parametrize("values", [(), (math.nan,), (math.inf, math.nan)])
def test_without_a_figure_there_is_no_line(values: tuple[float, ...]) -> None:
    assert draw_text_curve(points(*values), 10, 3) == []


def test_what_is_not_finite_is_passed_over() -> None:
    assert draw_text_curve(points(0, math.nan, 7), 3, 1) == ["▁▁█"]
    assert draw_text_curve(points(5), 3, 1) == ["▁▁▁"]
