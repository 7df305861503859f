"""The tables and charts of a page about a comparison."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import zip_longest
from math import isfinite
from statistics import fmean
from typing import Final

from lockstep.comparison.result import MIB, PARTS, Comparison, ResultRow, format_conclusions, make_columns
from lockstep.reporting.charts import Chart, make_bar_chart, make_line_chart
from lockstep.reporting.page import Paragraphs, Section, Table
from lockstep.reporting.run_log import EvaluationMetric
from lockstep.reporting.run_page import make_metric_chart

_MIN_CHART_VALUES: Final = 3  # minimum number of values in a sweep to draw a chart of the results
_LOG_AXIS_RATIO: Final = 20  # minimum ratio of the largest to the smallest value for a logarithmic axis
_ACTIVITIES: Final = ("setting up", *PARTS, "training", "evaluating", "saving")
_THROUGHPUT_NOTE: Final = "Samples per second of training. Setup, evaluations and saves are not counted."
_SECONDS_NOTE: Final = (
    "Mean over the ranks in the last start, by the activity of the main thread. Computing: on a core. Data: until the "
    "samples are ready, including the work that a rank does on them itself. Waiting: for other ranks and their "
    "messages, and for other threads of the rank. Waiting for a core: while all cores are busy. On CUDA, all of this "
    "is training."
)
_MEMORY_NOTE: Final = (
    "On a GPU, the allocated memory. Otherwise, the resident memory, including libraries and shared pages."
)


def make_title(comparison: Comparison) -> str:
    """Return a short page title. If there are several variants or placements, it contains their number."""
    placements, variants = {row.placement for row in comparison.rows}, {row.variant for row in comparison.rows}
    subject = f"{len(variants)} variants of {comparison.recipe}" if len(variants) > 1 else comparison.recipe
    return f"{subject} under {len(placements)} placements" if len(placements) > 1 else f"{subject}, {placements.pop()}"


def make_sections(comparison: Comparison) -> list[Section]:
    """Return the sections of the page: the table of runs, and charts of the results, time and memory.

    The results of a sweep are the metric curves of its runs. For several placements, charts over the number of
    processes come before the metric curves.
    """
    machine = [f"Measured on {comparison.machine}."] if comparison.machine else []
    cells = make_columns(comparison)
    if _is_sweep(comparison):
        del cells["placement"]  # the title already contains the placement
    note = (
        "Speed-up, efficiency and bits are relative to one process with the same recipe."
        if "same bits" in cells
        else ""
    )
    page_sections: list[Section] = [
        Paragraphs("", [*machine, *format_conclusions(comparison)]),
        Table("Runs", [*cells], [*zip(*cells.values(), strict=True)], note),
        *_make_scaling_charts(comparison),
        *_make_metric_charts(comparison),
        *_make_sweep_chart(comparison),
        *_make_time_and_memory_charts(comparison),
    ]
    return [section for section in page_sections if not isinstance(section, Paragraphs) or section.paragraphs]


def _is_sweep(comparison: Comparison) -> bool:
    """Return whether all rows have the same placement, but different variants of the recipe."""
    placements, variants = {row.placement for row in comparison.rows}, {row.variant for row in comparison.rows}
    return len(placements) == 1 < len(variants)


def _get_row_label(comparison: Comparison, row: ResultRow) -> str:
    return row.variant if _is_sweep(comparison) else row.label


def _make_scaling_charts(comparison: Comparison) -> Iterator[Chart]:
    """Yield charts over the number of processes, if the completed runs have different numbers of processes."""
    numbers = sorted({row.processes for row in comparison.done})
    if len(numbers) < 2:
        return
    make_scaling_chart = partial(make_line_chart, x="processes", legend="strategies")
    durations = _make_series(comparison, lambda row: row.seconds)
    yield make_scaling_chart("Time of the whole training", y="seconds", series=durations)
    throughput = _make_series(comparison, lambda row: row.samples_per_s)
    yield make_scaling_chart("Throughput", y="samples/s", series=throughput, note=_THROUGHPUT_NOTE)
    speed_up = _make_series(comparison, comparison.speed_up)
    ideal = {"ideal": [(float(number), float(number)) for number in numbers]}
    yield make_scaling_chart("Speed-up over one process", y="times", series=speed_up | ideal, ideal="ideal")
    efficiency = _make_series(comparison, comparison.efficiency)
    ideal = {"ideal": [(float(number), 1.0) for number in numbers]}
    yield make_scaling_chart("Scaling efficiency", y="speed-up / processes", series=efficiency | ideal, ideal="ideal")


def _make_series(
    comparison: Comparison, get_value: Callable[[ResultRow], float | None]
) -> dict[str, list[tuple[float, float]]]:
    """Return the (processes, value) points of each strategy and variant, starting with the single-process run."""
    rows = comparison.done
    series: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        name = f"{row.strategy}, {row.variant}" if row.variant else row.strategy
        reference = comparison.reference(row)
        has_strategies = any(candidate.strategy != "single" and candidate.variant == row.variant for candidate in rows)
        if row is reference and has_strategies:
            continue
        first = [] if reference is None or row is reference or row.processes == 1 else [reference]
        for point_row in [*(first if name not in series else []), row]:
            if (number := get_value(point_row)) is not None:
                series.setdefault(name, []).append((float(point_row.processes), number))
    return {name: sorted(points) for name, points in series.items()}


def _make_time_and_memory_charts(comparison: Comparison) -> Iterator[Chart]:
    """Yield a chart of the time that placements spend on each activity, and a chart of the peak memory per rank."""
    spent = [row for row in comparison.done if row.spent]
    parts = [part for part in _ACTIVITIES if any(part in row.spent for row in spent)]
    if parts:
        means = {part: [fmean(row.spent.get(part) or [0.0]) for row in spent] for part in parts}
        yield make_bar_chart(
            "Where each second goes",
            "seconds",
            means,
            [_get_row_label(comparison, row) for row in spent],
            note=_SECONDS_NOTE,
        )
    with_peak = [row for row in comparison.done if row.peak_bytes]
    if with_peak:
        peaks_by_rank = enumerate(zip_longest(*(row.peak_bytes for row in with_peak), fillvalue=0.0))
        peaks = {f"rank {rank}": [peak / MIB for peak in rank_peaks] for rank, rank_peaks in peaks_by_rank}
        placements = [_get_row_label(comparison, row) for row in with_peak]
        yield make_bar_chart("Peak memory of each rank", "MiB", peaks, placements, stacked=False, note=_MEMORY_NOTE)


def _make_metric_charts(comparison: Comparison) -> Iterator[Chart]:
    """Yield a chart of the loss and of each monitored metric, with a curve for each placement."""
    histories = {_get_row_label(comparison, row): row.history for row in comparison.done}
    for metric in dict.fromkeys(("loss", *(history.monitor for history in histories.values()))):
        if (chart := make_metric_chart(metric, histories)) is not None:
            yield chart


def _make_sweep_chart(comparison: Comparison) -> Iterator[Chart]:
    """If the comparison is a sweep over a number, yield a chart of the final metric over this number."""
    rows = comparison.done if _is_sweep(comparison) else []
    points, keys, metric_kinds = [], set(), set()
    for row in rows:
        key, _, text = row.variant.partition("=")
        value, metric = _parse_number(text), row.history.metric or _get_last_loss(row)
        if value is None or metric is None:
            return
        keys.add(key)
        metric_kinds.add((metric.name, metric.is_fraction))
        points.append((value, metric.value))
    if len(points) < _MIN_CHART_VALUES or len(keys) > 1 or len(metric_kinds) > 1:
        return
    [key], [(name, is_fraction)] = keys, metric_kinds
    low, high = min(points)[0], max(points)[0]
    yield make_line_chart(
        f"{name} by {key}",
        key,
        name,
        {name: sorted(points)},
        from_zero=is_fraction,
        percent=is_fraction,
        log_x=low > 0 and high / low >= _LOG_AXIS_RATIO,
    )


def _parse_number(text: str) -> float | None:
    """Parse a finite number. Return None if the text isn't a finite number."""
    with suppress(ValueError):
        if isfinite(number := float(text)):
            return number
    return None


def _get_last_loss(row: ResultRow) -> EvaluationMetric | None:
    value = row.history.get_evaluation_metric("loss")
    return None if value is None else EvaluationMetric("loss", value, is_fraction=False)
