"""A curve of any length in bounded memory.

It keeps the lowest and highest point of each stretch, so that no spike is lost.
"""

import math
from operator import attrgetter
from typing import Final, NamedTuple, final

_MOST: Final = 2_000  # points of a line; more would make a page slow, and a screen can't show more


class Point(NamedTuple):
    """A figure after `step` steps and `samples` samples.

    `seconds` is the time since the run began, without pauses.
    """

    step: int
    samples: int
    seconds: float
    value: float


@final
class Thinned:
    """Takes points in order and keeps all of them, up to 2,000. Longer curves are thinned to 1,000 to 2,000 points.

    A stretch is a number of consecutive points, which doubles whenever there are too many stretches. Both ends of the
    curve are kept. A point that isn't finite is only kept if its stretch has no finite points.
    """

    def __init__(self) -> None:
        self._stretches: list[list[Point]] = []
        self._open: list[Point] = []  # the points of the current stretch
        self._each = 1  # points of a stretch
        self._first: Point | None = None

    def append(self, point: Point) -> None:
        """Take the next point."""
        if self._first is None:
            self._first = point
        self._open.append(point)
        if len(self._open) > self._each:  # one extra, so that the last point is always kept
            last = self._open.pop()
            self._stretches.append(_ends(self._open))
            self._open = [last]
            while len(self._stretches) * min(self._each, 2) >= _MOST:
                self._merge()

    def cut(self, step: int) -> None:
        """Drop all points after `step`."""
        self._open = [point for point in self._open if point.step <= step]
        stretches = ([point for point in each if point.step <= step] for each in self._stretches)
        self._stretches = [each for each in stretches if each]
        if self._first is not None and self._first.step > step:
            self._first = None

    def points(self) -> list[Point]:
        """Return the points that were kept, in order."""
        found = [point for stretch in self._stretches for point in stretch]
        if self._each == 1:
            return [*found, *self._open]
        first = [] if self._first is None else [self._first]
        last = [*_ends(self._open), self._open[-1]] if self._open else []
        return list(dict.fromkeys([*first, *found, *last]))  # each point once

    def _merge(self) -> None:
        """Merge pairs of stretches."""
        pairs = zip(self._stretches[::2], self._stretches[1::2], strict=True)
        self._stretches = [_ends([*one, *other]) for one, other in pairs]
        self._each *= 2


def _ends(points: list[Point]) -> list[Point]:
    """Return the lowest and the highest of some points, in order."""
    if len(points) < 2:
        return points
    finite = [point for point in points if math.isfinite(point.value)] or points[:1]
    by_value = attrgetter("value")
    low, high = min(finite, key=by_value), max(finite, key=by_value)
    return [low] if low is high else sorted((low, high))
