"""Stores a curve of any length in bounded memory.

A long curve is reduced to the lowest and the highest point of each range of steps, so that no spike is lost.
"""

import math
from operator import attrgetter
from typing import Final, NamedTuple, final

_MAX_POINTS: Final = 2_000  # more points would slow down a page, and a screen can't show them


class Point(NamedTuple):
    """The value of a metric after `step` steps and `samples` samples.

    `seconds` is the training time since the start of the run, without pauses.
    """

    step: int
    samples: int
    seconds: float
    value: float


@final
class ThinnedCurve:
    """A curve that keeps all points up to a length of 2,000. Longer curves are thinned to between 1,000 and 2,000.

    Thinning divides the curve into stretches of consecutive points, and reduces each stretch to its lowest and highest
    point. Whenever there are too many stretches, pairs of stretches are merged. The first and the last point of the
    curve are always kept. A non-finite point is only kept if its stretch has no finite points.
    """

    def __init__(self) -> None:
        self._stretches: list[list[Point]] = []
        self._current_stretch: list[Point] = []  # all points of the last stretch, which is still growing
        self._stretch_size = 1  # number of points in a stretch before it is reduced
        self._first: Point | None = None

    def append(self, point: Point) -> None:
        """Add the next point."""
        if self._first is None:
            self._first = point
        self._current_stretch.append(point)
        if len(self._current_stretch) > self._stretch_size:  # keep one point in it, so that the last one is never lost
            last = self._current_stretch.pop()
            self._stretches.append(_find_extremes(self._current_stretch))
            self._current_stretch = [last]
            while len(self._stretches) * min(self._stretch_size, 2) >= _MAX_POINTS:
                self._merge_stretches()

    def truncate(self, step: int) -> None:
        """Drop all points after `step`."""
        self._current_stretch = [point for point in self._current_stretch if point.step <= step]
        stretches = ([point for point in each if point.step <= step] for each in self._stretches)
        self._stretches = [each for each in stretches if each]
        if self._first is not None and self._first.step > step:
            self._first = None

    def get_points(self) -> list[Point]:
        """Return the points that are kept, in order."""
        points = [point for stretch in self._stretches for point in stretch]
        if self._stretch_size == 1:
            return [*points, *self._current_stretch]
        first = [] if self._first is None else [self._first]
        last = [*_find_extremes(self._current_stretch), self._current_stretch[-1]] if self._current_stretch else []
        return list(dict.fromkeys([*first, *points, *last]))  # removes duplicates

    def _merge_stretches(self) -> None:
        """Merge consecutive pairs of stretches into stretches of twice the size."""
        pairs = zip(self._stretches[::2], self._stretches[1::2], strict=True)
        self._stretches = [_find_extremes([*one, *other]) for one, other in pairs]
        self._stretch_size *= 2


def _find_extremes(points: list[Point]) -> list[Point]:
    """Return the lowest and the highest point, in their original order."""
    if len(points) < 2:
        return points
    finite = [point for point in points if math.isfinite(point.value)] or points[:1]
    by_value = attrgetter("value")
    low, high = min(finite, key=by_value), max(finite, key=by_value)
    return [low] if low is high else sorted((low, high))
