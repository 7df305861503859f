"""What came of one recipe under several placements, as the tables and charts of a page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from lockstep.reporting import usual
from lockstep.reporting.charts import Chart, bars, curves, lines
from lockstep.reporting.comparison import PARTS, Comparison, Row, cells, conclusion
from lockstep.reporting.page import Section, Table, Words
from lockstep.reporting.thinning import Point

_MIB = 1 << 20


def sections(comparison: Comparison) -> list[Section]:
    """Return what a page on the comparison shows: the table, what is drawn over processes, and the curves."""
    done = [row for row in comparison.rows if row.state == "done"]
    machine = [f"Measured on {comparison.machine}."] if comparison.machine else []
    headings, rows = cells(comparison)
    below = "Speed-up, efficiency and bits are beside one process of the same recipe."
    found: list[Section] = [
        Words("", [*machine, *conclusion(comparison)]),
        Table("Placements", headings, rows, below),
        *_usual(comparison, done),
        *_over_processes(comparison, done),
        *_inside(done),
        *_curves(done),
    ]
    return [each for each in found if not isinstance(each, Words) or each.paragraphs]


def _usual(comparison: Comparison, done: Sequence[Row]) -> Iterator[Section]:
    """Yield what the usual script makes of the recipe, where it ran."""
    headings, rows = usual.cells(comparison)
    if not rows:
        return
    yield Table("What the usual script makes of it", headings, rows, usual.NOTE)
    figure = usual.monitored(comparison)
    found = _series(comparison, done, lambda row: row.history.last_of(usual.curve(figure)))
    if len({number for points in found.values() for number, _ in points}) > 1:
        yield lines(f"{figure} in the end", "processes", figure, found)


def _over_processes(comparison: Comparison, done: Sequence[Row]) -> Iterator[Chart]:
    """Yield what people draw over the number of processes, where there are several."""
    numbers = sorted({row.processes for row in done})
    if len(numbers) < 2:
        return
    time = _series(comparison, done, lambda row: row.seconds)
    yield lines("Time of the whole training", "processes", "seconds", time)
    throughput = _series(comparison, done, lambda row: row.samples_per_s)
    yield lines("Throughput", "processes", "samples/s", throughput, note=_THROUGHPUT)
    speed_up = _series(comparison, done, comparison.speed_up)
    ideal = {"ideal": [(float(number), float(number)) for number in numbers]}
    yield lines("Speed-up over one process", "processes", "times", speed_up | ideal, ideal="ideal")
    efficiency = _series(comparison, done, comparison.efficiency)
    ideal = {"ideal": [(float(number), 1.0) for number in numbers]}
    yield lines("Scaling efficiency", "processes", "speed-up / processes", efficiency | ideal, ideal="ideal")


def _series(
    comparison: Comparison, done: Sequence[Row], value: Callable[[Row], float | None]
) -> dict[str, list[tuple[float, float]]]:
    """Return a line for each strategy and recipe, which begins at the one process that they have in common."""
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


def _inside(done: Sequence[Row]) -> Iterator[Chart]:
    """Yield where seconds and memory of each placement go."""
    spent = [row for row in done if row.spent]
    parts = [each for each in _SPENT if any(each in row.spent for row in spent)]
    if parts:
        means = {part: [_mean(row.spent.get(part, [0.0])) for row in spent] for part in parts}
        yield bars("Where each second goes", "seconds", means, [row.label for row in spent], note=_SECONDS)
    with_peak = [row for row in done if row.peak_bytes]
    if with_peak:
        ranks = max(len(row.peak_bytes) for row in with_peak)
        peaks = {f"rank {rank}": [_peak(row, rank) for row in with_peak] for rank in range(ranks)}
        of = [row.label for row in with_peak]
        yield bars("Peak memory of each rank", "MiB", peaks, of, stacked=False, note=_MEMORY)


def _curves(done: Sequence[Row]) -> Iterator[Chart]:
    """Yield the losses and the task's figures of all placements, one over the other."""
    monitors = dict.fromkeys(row.history.monitor for row in done)
    for name in dict.fromkeys(("loss/train", "loss/validation", *monitors)):
        found: Mapping[str, Sequence[Point]] = {
            row.label: row.history.curves[name] for row in done if name in row.history.curves
        }
        if found:
            percent = any(name in row.history.fractions for row in done)
            yield curves(name, found, name, percent=percent)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _peak(row: Row, rank: int) -> float:
    return row.peak_bytes[rank] / _MIB if rank < len(row.peak_bytes) else 0.0


_SPENT = ("setting up", *PARTS, "training", "evaluating", "saving")
_THROUGHPUT = "Samples by seconds of training: setting up, evaluating and saving are left out."
_SECONDS = (
    "Mean of the ranks, of the last start, by what the main thread of a rank does. Computing: on a core. Data: until "
    "samples are there, what a rank does to them itself included. Waiting: for other ranks and what they send, and for "
    "threads of its own. Waiting for a core: while others run on all that there are. On CUDA all of these are training."
)
_MEMORY = "Of a GPU what was allocated there, else what was resident, libraries and shared pages included."
