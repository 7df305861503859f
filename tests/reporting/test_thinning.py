"""Curves in bounded memory: exact while they are short, and with every spike however long they are."""

import math
from itertools import pairwise

import pytest

from lockstep.reporting.thinning import Point, ThinnedCurve


def curve(number: int, **special: float) -> tuple[ThinnedCurve, list[Point]]:
    """Return a curve of so many points of value 1, but for `special` ones, `at7` for one, and these points."""
    points = [Point(n, 64 * n, float(n), special.get(f"at{n}", 1.0)) for n in range(number)]
    thinned = ThinnedCurve()
    for point in points:
        thinned.append(point)
    return thinned, points


@pytest.mark.parametrize("number", [0, 1, 2, 1_999])
def test_a_short_curve_is_kept_whole(number: int) -> None:
    thinned, points = curve(number)
    assert thinned.get_points() == points


@pytest.mark.parametrize("number", [2_001, 5_000, 77_779, 100_000])
def test_a_long_curve_keeps_its_ends_and_its_spikes(number: int) -> None:
    thinned, points = curve(number, at1=-3.0, at1234=8.0, at77777=9.0)
    kept = thinned.get_points()
    assert 500 < len(kept) <= 2_005
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    assert {each for each in points if each.value != 1} <= set(kept)
    assert all(one.step < other.step for one, other in pairwise(kept))
    assert max(other.step - one.step for one, other in pairwise(kept)) <= 4 * number / 500  # evenly: old ones too


def test_what_is_not_finite_hides_no_other_point() -> None:
    thinned, points = curve(10_000, **{f"at{n}": math.nan for n in range(10_000) if n % 100 or n == 0})
    finite = [each for each in thinned.get_points() if math.isfinite(each.value)]
    assert finite == [each for each in points if math.isfinite(each.value)]


@pytest.mark.parametrize("number", [1_000, 10_000])
def test_a_run_that_resumes_loses_what_it_recomputes(number: int) -> None:
    thinned, _ = curve(number)
    thinned.truncate(500)
    assert {each.step for each in thinned.get_points()} <= set(range(501))
    assert thinned.get_points()[0].step == 0
    thinned.append(Point(501, 64 * 501, 1e6, 5.0))
    assert thinned.get_points()[-1].value == 5.0
    thinned.truncate(-1)
    assert thinned.get_points() == []
