"""The results of a comparison as tables and charts of a page."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import zip_longest
from math import isfinite
from statistics import fmean
from typing import Final

from lockstep.comparison.result import MIB, PARTS, Comparison, ResultRow, columns, conclusion
from lockstep.reporting.charts import Chart, bars, lines
from lockstep.reporting.page import Section, Table, Words
from lockstep.reporting.run_log import Figure
from lockstep.reporting.run_page import chart

_FEWEST: Final = 3  # values of a sweep that have a chart of the results
_WIDE: Final = 20  # the ratio of the largest to the smallest value from which their axis is logarithmic
_SPENT: Final = ("setting up", *PARTS, "training", "evaluating", "saving")
_THROUGHPUT: Final = "Samples by seconds of training: setting up, evaluating and saving are left out."
_SECONDS: Final = (
    "Mean of the ranks, of the last start, by what the main thread of a rank does. Computing: on a core. Data: until "
    "samples are there, what a rank does to them itself included. Waiting: for other ranks and what they send, and for "
    "threads of its own. Waiting for a core: while others run on all that there are. On CUDA all of these are training."
)
_MEMORY: Final = "Of a GPU what was allocated there, else what was resident, libraries and shared pages included."


def title(comparison: Comparison) -> str:
    """Return a short title with the number of variants, placements, or both."""
    placements, variants = {row.placement for row in comparison.rows}, {row.variant for row in comparison.rows}
    of = f"{len(variants)} variants of {comparison.recipe}" if len(variants) > 1 else comparison.recipe
    return f"{of} under {len(placements)} placements" if len(placements) > 1 else f"{of}, {placements.pop()}"


def sections(comparison: Comparison) -> list[Section]:
    """Return the sections of the page: the table, the results, and then time and memory.

    The results of a sweep are its curves. The results of several placements are the charts over the number of
    processes, followed by the curves.
    """
    machine = [f"Measured on {comparison.machine}."] if comparison.machine else []
    shown = columns(comparison)
    if _is_sweep(comparison):
        del shown["placement"]  # the title has it
    below = "Speed-up, efficiency and bits are beside one process of the same recipe." if "same bits" in shown else ""
    found: list[Section] = [
        Words("", [*machine, *conclusion(comparison)]),
        Table("Runs", [*shown], [*zip(*shown.values(), strict=True)], below),
        *_scaling_charts(comparison),
        *_curves(comparison),
        *_over_values(comparison),
        *_inside(comparison),
    ]
    return [each for each in found if not isinstance(each, Words) or each.paragraphs]


def _is_sweep(comparison: Comparison) -> bool:
    """Return whether the rows have the same placement and differ in their recipes."""
    placements, variants = {row.placement for row in comparison.rows}, {row.variant for row in comparison.rows}
    return len(placements) == 1 < len(variants)


def _label(comparison: Comparison, row: ResultRow) -> str:
    return row.variant if _is_sweep(comparison) else row.label


def _scaling_charts(comparison: Comparison) -> Iterator[Chart]:
    """Yield charts over the number of processes, if there are several numbers."""
    numbers = sorted({row.processes for row in comparison.done})
    if len(numbers) < 2:
        return
    over_processes = partial(lines, x="processes", legend="strategies")
    time = _series(comparison, lambda row: row.seconds)
    yield over_processes("Time of the whole training", y="seconds", series=time)
    throughput = _series(comparison, lambda row: row.samples_per_s)
    yield over_processes("Throughput", y="samples/s", series=throughput, note=_THROUGHPUT)
    speed_up = _series(comparison, comparison.speed_up)
    ideal = {"ideal": [(float(number), float(number)) for number in numbers]}
    yield over_processes("Speed-up over one process", y="times", series=speed_up | ideal, ideal="ideal")
    efficiency = _series(comparison, comparison.efficiency)
    ideal = {"ideal": [(float(number), 1.0) for number in numbers]}
    yield over_processes("Scaling efficiency", y="speed-up / processes", series=efficiency | ideal, ideal="ideal")


def _series(comparison: Comparison, value: Callable[[ResultRow], float | None]) -> dict[str, list[tuple[float, float]]]:
    """Return a line for each strategy and recipe, starting at their common run on a single process."""
    done = comparison.done
    found: dict[str, list[tuple[float, float]]] = {}
    for row in done:
        name = f"{row.strategy}, {row.variant}" if row.variant else row.strategy
        reference = comparison.reference(row)
        several = any(each.strategy != "single" and each.variant == row.variant for each in done)
        if row is reference and several:
            continue
        first = [] if reference is None or row is reference or row.processes == 1 else [reference]
        for each in [*(first if name not in found else []), row]:
            if (number := value(each)) is not None:
                found.setdefault(name, []).append((float(each.processes), number))
    return {name: sorted(points) for name, points in found.items()}


def _inside(comparison: Comparison) -> Iterator[Chart]:
    """Yield charts of the time and memory of each placement."""
    spent = [row for row in comparison.done if row.spent]
    parts = [each for each in _SPENT if any(each in row.spent for row in spent)]
    if parts:
        means = {part: [fmean(row.spent.get(part) or [0.0]) for row in spent] for part in parts}
        yield bars(
            "Where each second goes", "seconds", means, [_label(comparison, row) for row in spent], note=_SECONDS
        )
    with_peak = [row for row in comparison.done if row.peak_bytes]
    if with_peak:
        by_rank = enumerate(zip_longest(*(row.peak_bytes for row in with_peak), fillvalue=0.0))
        peaks = {f"rank {rank}": [each / MIB for each in held] for rank, held in by_rank}
        of = [_label(comparison, row) for row in with_peak]
        yield bars("Peak memory of each rank", "MiB", peaks, of, stacked=False, note=_MEMORY)


def _curves(comparison: Comparison) -> Iterator[Chart]:
    """Yield charts of the loss and of the task's figures, with the curves of all placements."""
    histories = {_label(comparison, row): row.history for row in comparison.done}
    for figure in dict.fromkeys(("loss", *(each.monitor for each in histories.values()))):
        if (found := chart(figure, histories)) is not None:
            yield found


def _over_values(comparison: Comparison) -> Iterator[Chart]:
    """Yield a chart of the last evaluation over the value that a sweep changes, if it changes a number."""
    rows = comparison.done if _is_sweep(comparison) else []
    points, keys, figures = [], set(), set()
    for row in rows:
        key, _, text = row.variant.partition("=")
        value, figure = _number(text), row.history.figure or _last_loss(row)
        if value is None or figure is None:
            return
        keys.add(key)
        figures.add((figure.name, figure.is_fraction))
        points.append((value, figure.value))
    if len(points) < _FEWEST or len(keys) > 1 or len(figures) > 1:
        return
    [key], [(name, is_fraction)] = keys, figures
    low, high = min(points)[0], max(points)[0]
    yield lines(
        f"{name} by {key}",
        key,
        name,
        {name: sorted(points)},
        from_zero=is_fraction,
        percent=is_fraction,
        log_x=low > 0 and high / low >= _WIDE,
    )


def _number(text: str) -> float | None:
    """Return a finite number from its text, or None."""
    with suppress(ValueError):
        if isfinite(number := float(text)):
            return number
    return None


def _last_loss(row: ResultRow) -> Figure | None:
    value = row.history.of_evaluation("loss")
    return None if value is None else Figure("loss", value, is_fraction=False)
