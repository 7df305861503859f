"""Draws a curve as text, using Unicode block characters with a resolution of an eighth of a line."""

import math
from collections.abc import Sequence
from typing import Final

from lockstep.reporting.thinning import Point

_EIGHTHS: Final = " ▁▂▃▄▅▆▇█"


def draw_text_curve(points: Sequence[Point], width: int, height: int) -> list[str]:
    """Return a curve as `height` lines of `width` characters. Each column shows the mean over a range of samples.

    The lowest column is an eighth of a line high, and the highest column fills all lines. Non-finite values are
    skipped. Returns an empty list if there are no points.
    """
    columns = _compute_columns([point for point in points if math.isfinite(point.value)], width)
    values = [value for value in columns if value is not None]
    if not values or height < 1:
        return []
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    eighths = [0 if each is None else 1 + round((each - low) / span * (8 * height - 1)) for each in columns]
    return [
        "".join(_EIGHTHS[min(max(each - 8 * below, 0), 8)] for each in eighths) for below in reversed(range(height))
    ]


def _compute_columns(points: Sequence[Point], width: int) -> list[float | None]:
    """Return the mean of the points in each column. A column without points repeats the previous value."""
    if not points:
        return [None] * width
    first, last = points[0].samples, points[-1].samples
    values_by_column: list[list[float]] = [[] for _ in range(width)]
    for point in points:
        column = (point.samples - first) * (width - 1) // max(last - first, 1)
        values_by_column[min(max(column, 0), width - 1)].append(point.value)
    columns: list[float | None] = []
    for values in values_by_column:
        before = columns[-1] if columns else None
        columns.append(math.fsum(value / len(values) for value in values) if values else before)
    return columns
