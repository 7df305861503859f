"""A row of costs cut into contiguous parts, so that the dearest part is as cheap as it can be."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate


def balance(costs: Sequence[float], parts: int, allowed: Collection[int], needed: Sequence[bool]) -> list[int] | None:
    """Return where to cut: `parts` - 1 rising positions out of `allowed`, or None where there is no such cut.

    Position p is before item p. Each part holds at least one item that is `needed`. Of all cuts whose dearest part
    is cheapest it is the one with the cheapest sum of squares, so that the other parts are even too.
    """
    length = len(costs)
    sums, wanted = [0.0, *accumulate(costs)], [0, *accumulate(map(int, needed))]
    places = [place for place in sorted(set(allowed)) if 0 < place < length]
    # best[place]: (dearest part, sum of squares, cuts) for the items before `place` in as many parts as rounds so far.
    best = {place: _single(sums[place], ()) for place in [*places, length] if wanted[place]}
    for _ in range(parts - 1):
        best = {
            stop: min(options)
            for stop in [*places, length]
            if (
                options := [
                    _join(best[start], sums[stop] - sums[start], start)
                    for start in places
                    if start < stop and start in best and wanted[stop] > wanted[start]
                ]
            )
        }
    return list(best[length][2]) if length in best else None


_Cut = tuple[float, float, tuple[int, ...]]


def _single(cost: float, cuts: tuple[int, ...]) -> _Cut:
    return cost, cost * cost, cuts


def _join(before: _Cut, cost: float, start: int) -> _Cut:
    dearest, squares, cuts = before
    return max(dearest, cost), squares + cost * cost, (*cuts, start)
