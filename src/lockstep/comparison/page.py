"""The results of a comparison as tables and charts of a page."""

from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from statistics import fmean
from typing import Final

from lockstep.comparison.result import MIB, PARTS, Comparison, ResultRow, columns, conclusion
from lockstep.reporting.charts import Chart, bars, lines
from lockstep.reporting.page import Section, Table, Words
from lockstep.reporting.run_page import chart

_SPENT: Final = ("setting up", *PARTS, "training", "evaluating", "saving")
_THROUGHPUT: Final = "Samples per second of training. Setup, evaluations and saves are not counted."
_SECONDS: Final = (
    "Mean over the ranks in the last start, by the activity of the main thread. Computing: on a core. Data: until the "
    "samples are ready, including the work that a rank does on them itself. Waiting: for other ranks and their "
    "messages, and for other threads of the rank. Waiting for a core: while all cores are busy. On CUDA, all of this "
    "is training."
)
_MEMORY: Final = "On a GPU, the allocated memory. Otherwise, the resident memory, including libraries and shared pages."


def title(comparison: Comparison) -> str:
    """Return a short title with the number of variants, placements, or both."""
    placements, variants = {row.placement for row in comparison.rows}, {row.variant for row in comparison.rows}
    subject = f"{len(variants)} variants of {comparison.recipe}" if len(variants) > 1 else comparison.recipe
    return f"{subject} under {len(placements)} placements" if len(placements) > 1 else f"{subject}, {placements.pop()}"


def sections(comparison: Comparison) -> list[Section]:
    """Return the sections of the page: the table, charts over the number of processes, and the curves."""
    machine = [f"Measured on {comparison.machine}."] if comparison.machine else []
    cells = columns(comparison)
    note = (
        "Speed-up, efficiency and bits are relative to one process with the same recipe."
        if "same bits" in cells
        else ""
    )
    page_sections: list[Section] = [
        Words("", [*machine, *conclusion(comparison)]),
        Table("Runs", [*cells], [*zip(*cells.values(), strict=True)], note),
        *_scaling_charts(comparison),
        *_inside(comparison.done),
        *_curves(comparison.done),
    ]
    return [section for section in page_sections if not isinstance(section, Words) or section.paragraphs]


def _scaling_charts(comparison: Comparison) -> Iterator[Chart]:
    """Yield charts over the number of processes, if there are several numbers."""
    numbers = sorted({row.processes for row in comparison.done})
    if len(numbers) < 2:
        return
    time = _series(comparison, lambda row: row.seconds)
    yield lines("Time of the whole training", "processes", "seconds", time)
    throughput = _series(comparison, lambda row: row.samples_per_s)
    yield lines("Throughput", "processes", "samples/s", throughput, note=_THROUGHPUT)
    speed_up = _series(comparison, comparison.speed_up)
    ideal = {"ideal": [(float(number), float(number)) for number in numbers]}
    yield lines("Speed-up over one process", "processes", "times", speed_up | ideal, ideal="ideal")
    efficiency = _series(comparison, comparison.efficiency)
    ideal = {"ideal": [(float(number), 1.0) for number in numbers]}
    yield lines("Scaling efficiency", "processes", "speed-up / processes", efficiency | ideal, ideal="ideal")


def _series(comparison: Comparison, value: Callable[[ResultRow], float | None]) -> dict[str, list[tuple[float, float]]]:
    """Return a line for each strategy and recipe, starting at their common run on a single process."""
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
            if (number := value(point_row)) is not None:
                series.setdefault(name, []).append((float(point_row.processes), number))
    return {name: sorted(points) for name, points in series.items()}


def _inside(rows: Sequence[ResultRow]) -> Iterator[Chart]:
    """Yield charts of the time and memory of each placement."""
    spent = [row for row in rows if row.spent]
    parts = [part for part in _SPENT if any(part in row.spent for row in spent)]
    if parts:
        means = {part: [fmean(row.spent.get(part) or [0.0]) for row in spent] for part in parts}
        yield bars("Where each second goes", "seconds", means, [row.label for row in spent], note=_SECONDS)
    with_peak = [row for row in rows if row.peak_bytes]
    if with_peak:
        peaks_by_rank = enumerate(zip_longest(*(row.peak_bytes for row in with_peak), fillvalue=0.0))
        peaks = {f"rank {rank}": [peak / MIB for peak in rank_peaks] for rank, rank_peaks in peaks_by_rank}
        labels = [row.label for row in with_peak]
        yield bars("Peak memory of each rank", "MiB", peaks, labels, stacked=False, note=_MEMORY)


def _curves(rows: Sequence[ResultRow]) -> Iterator[Chart]:
    """Yield charts of the loss and of the task's figures, with the curves of all placements."""
    histories = {row.label: row.history for row in rows}
    for figure in dict.fromkeys(("loss", *(history.monitor for history in histories.values()))):
        if (figure_chart := chart(figure, histories)).figure["data"]:
            yield figure_chart
