"""The results of a comparison, as a table and as JSON."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Literal

from rich.console import Console, RenderableType

from lockstep.reporting import wording
from lockstep.reporting.run_log import (
    History,
    describe_best_run,
    get_count,
    get_peak_bytes_by_rank,
    get_seconds_by_rank,
)
from lockstep.reporting.run_view import format_loss
from lockstep.reporting.terminal import create_table

State = Literal["waiting", "running", "done", "failed"]

# The parts of the training time in the table, as named in the Done event. If the time isn't split into parts, the
# event only contains the total, `training`.
PARTS: Final = ("computing", "data", "waiting", "waiting for a core")
_TRAINING: Final = (*PARTS, "training")
MIB: Final = 1 << 20
_UNINFORMATIVE_CELLS: Final = {"", "done", "1.00", "100%", "0%"}  # a column that only contains one of these is omitted
_STYLES: Final = {"waiting": "dim", "running": "green", "failed": "red"}


@dataclass(frozen=True)
class ResultRow:
    """The result of training a recipe on a placement, with its run in `folder`. `Comparison.rows` contains these rows.

    `variant` is the override that is compared with the original recipe. In rows of the original recipe, it contains the
    original values of the compared keys. `promises` is how closely the strategy promises to match a single process:
    `bits`, `close` or `none`. If the run failed, `reason` is the error. `step`, `steps` and `left_s` describe the
    progress of a run.
    """

    strategy: str
    processes: int
    variant: str
    folder: str
    promises: str = "bits"
    state: State = "waiting"
    step: int = 0
    steps: int = 0
    left_s: float | None = None
    reason: str = ""
    history: History = field(default_factory=History)

    @property
    def placement(self) -> str:
        """The placement as text."""
        return f"{self.strategy} on {self.processes}"

    @property
    def label(self) -> str:
        """The placement as text, followed by the variant."""
        return f"{self.placement}, {self.variant}" if self.variant else self.placement

    @property
    def seconds(self) -> float | None:
        """The seconds from the first step to the end, including evaluations and saves.

        If the run was resumed, this is the sum over all starts of the run.
        """
        return self.history.seconds if self.state == "done" else None

    @property
    def spent(self) -> dict[str, list[float]]:
        """The seconds that each rank spent on each activity since the latest start of the run."""
        return get_seconds_by_rank(self.history.last)

    @property
    def peak_bytes(self) -> list[float]:
        """The peak memory of each rank, in bytes."""
        return get_peak_bytes_by_rank(self.history.last)

    @property
    def samples_per_s(self) -> float | None:
        """The training throughput since the latest start of the run, in samples per second.

        The time of setup, evaluations and saves is excluded.
        """
        seconds = sum(self.spent[part][0] for part in _TRAINING if part in self.spent)
        end, begin = get_count(self.history.last, "samples"), get_count(self.history.started, "samples")
        if self.state != "done" or not seconds or end is None or begin is None or end <= begin:
            return None
        return (end - begin) / seconds

    def part(self, name: str) -> float | None:
        """Return the fraction of training time that ranks spent on an activity, such as `data`, or None if unknown."""
        total = sum(sum(self.spent.get(part_name, ())) for part_name in PARTS)
        return sum(self.spent.get(name, ())) / total if total else None


@dataclass(frozen=True)
class Comparison:
    """The result of `compare`, with a row for each placement, in the order in which they ran.

    `machine` is a description of the machine that ran them.
    """

    recipe: str
    rows: tuple[ResultRow, ...]
    machine: str = ""

    def reference(self, row: ResultRow) -> ResultRow | None:
        """Return the reference for `row`: the row of the same recipe on a single process.

        Returns None if that run isn't complete.
        """
        references = [
            candidate for candidate in self.rows if candidate.variant == row.variant and candidate.strategy == "single"
        ]
        return references[0] if references and references[0].state == "done" else None

    def speed_up(self, row: ResultRow) -> float | None:
        """Return the throughput relative to a single process, or None if either throughput is unknown."""
        reference = self.reference(row)
        throughput, reference_throughput = row.samples_per_s, reference.samples_per_s if reference else None
        return throughput / reference_throughput if throughput and reference_throughput else None

    def efficiency(self, row: ResultRow) -> float | None:
        """Return the speed-up divided by the number of processes, or None if it is unknown."""
        speed_up = self.speed_up(row)
        return None if speed_up is None else speed_up / row.processes

    def same_bits(self, row: ResultRow) -> bool | None:
        """Return whether the weights are identical to those of a single process.

        Returns None if either hash is missing.
        """
        reference, weights_sha256 = self.reference(row), row.history.weights_sha256
        return weights_sha256 == reference.history.weights_sha256 if reference and weights_sha256 else None

    @property
    def broken(self) -> list[ResultRow]:
        """The rows whose strategy promises the same bits as a single process, but whose weights differ."""
        return [row for row in self.rows if row.promises == "bits" and self.same_bits(row) is False]

    @property
    def done(self) -> list[ResultRow]:
        """The rows of placements that completed training."""
        return [row for row in self.rows if row.state == "done"]

    @property
    def figure(self) -> str:
        """The name of the monitored metric of the recipe."""
        return next((row.history.monitor for row in self.rows if row.history.started), "loss")

    @property
    def failed(self) -> list[ResultRow]:
        """The rows of placements that failed."""
        return [row for row in self.rows if row.state == "failed"]

    @property
    def left_s(self) -> float | None:
        """The remaining seconds of the comparison, or None if they can't be estimated.

        The estimate is the remaining time of the current run, plus the mean duration of the completed and current runs
        for each waiting run.
        """
        durations = [row.seconds for row in self.rows if row.seconds is not None]
        running = [row for row in self.rows if row.state == "running"]
        if any(row.left_s is None for row in running):
            return None
        running_totals = [row.history.seconds + (row.left_s or 0) for row in running]
        waiting_count = sum(row.state == "waiting" for row in self.rows)
        if waiting_count and not durations + running_totals:
            return None
        mean = sum(durations + running_totals) / len(durations + running_totals) if waiting_count else 0.0
        return sum(row.left_s or 0 for row in running) + waiting_count * mean


_Column = tuple[str, Callable[[Comparison, ResultRow], str]]  # a heading, and a function that returns the cell of a row


def make_columns(comparison: Comparison) -> dict[str, list[str]]:
    """Return the columns of the results table, as a dict from headings to cells.

    The most important columns come first. Columns without information are omitted.
    """
    rows = [row if row.state == "done" else replace(row, history=History()) for row in comparison.rows]
    metric_names = dict.fromkeys(row.history.metric.name for row in rows if row.history.metric)
    metric_columns: list[_Column] = [(name, partial(_format_metric, name)) for name in metric_names]
    all_columns = [*_COLUMNS[:_FIRST_METRIC_COLUMN], *metric_columns, *_COLUMNS[_FIRST_METRIC_COLUMN:]]
    cells = [(heading, [cell(comparison, row) for row in rows]) for heading, cell in all_columns]
    cells.insert(_FIRST_METRIC_COLUMN + len(metric_names), ("best", describe_best_run([row.history for row in rows])))
    return {
        heading: values for heading, values in cells if len({*values} - {""}) > 1 or {*values} - _UNINFORMATIVE_CELLS
    }


def make_table(comparison: Comparison, console: Console) -> RenderableType:
    """Return the results as a table for a terminal."""
    styles = [_STYLES.get(row.state, "") for row in comparison.rows]
    return create_table(console, make_columns(comparison), styles, ("placement", "recipe", "state"))


def format_conclusions(comparison: Comparison) -> list[str]:
    """Return lines about failed runs and about strategies that broke their promise, to show below the table."""
    lines = [f"{row.label} failed: {row.reason}" for row in comparison.failed]
    return lines + [
        f"{row.label} has different weights than one process, although strategy {row.strategy} promises the same bits; "
        f"find the first difference with lockstep verify"
        for row in comparison.broken
    ]


def to_json(comparison: Comparison) -> str:
    """Return the comparison as JSON, with all values of each row. Unknown values are null."""
    rows = [_row_to_dict(comparison, row) for row in comparison.rows]
    return json.dumps({"recipe": comparison.recipe, "machine": comparison.machine, "rows": rows}, indent=1) + "\n"


def _row_to_dict(comparison: Comparison, row: ResultRow) -> dict[str, Any]:
    evaluated = {name: points[-1].value for name, points in row.history.curves.items()}
    return {
        "placement": row.placement,
        "strategy": row.strategy,
        "processes": row.processes,
        "variant": row.variant,
        "run": row.folder,
        "state": row.state,
        "reason": row.reason or None,
        "starts": len(row.history.starts),
        "seconds": row.seconds,
        "samples_per_s": row.samples_per_s,
        "speed_up": comparison.speed_up(row),
        "efficiency": comparison.efficiency(row),
        "last": {name: value if math.isfinite(value) else str(value) for name, value in evaluated.items()},
        "seconds_by_rank": row.spent,
        "peak_bytes_by_rank": row.peak_bytes,
        "weights_sha256": row.history.weights_sha256 or None,
        "same_bits_as_single": comparison.same_bits(row),
        "promises": row.promises,
    }


def format_state(comparison: Comparison, row: ResultRow) -> str:
    """Format the state of a row. For the current run, this is its progress."""
    if row.state != "running":
        return row.state
    left_text = "" if row.left_s is None else f", {wording.format_duration(row.left_s)} left"
    return f"step {row.step:,}/{row.steps:,}{left_text}" if row.steps else "starting"


def _format_variant(comparison: Comparison, row: ResultRow) -> str:
    """Format the variant of a row. Rows with the variant of the first row have no override from --also."""
    return f"{row.variant} (unchanged)" if row.variant and row.variant == comparison.rows[0].variant else row.variant


def _format_bit_equality(comparison: Comparison, row: ResultRow) -> str:
    same = comparison.same_bits(row)
    if same is None or row is comparison.reference(row):
        return ""
    return "yes" if same else "no" if row.promises == "bits" else f"no ({row.promises})".replace("none", "not promised")


def _format_metric(metric_name: str, _: Comparison, row: ResultRow) -> str:
    metric = row.history.metric
    return wording.format_value(metric.value, metric.is_fraction) if metric and metric.name == metric_name else ""


def _format_number(value: float | None, fmt: str) -> str:
    return "" if value is None else fmt.format(value)


def _format_time_fraction(row: ResultRow, activity: str) -> str:
    return _format_number(row.part(activity), "{:.0%}")


_FIRST_METRIC_COLUMN: Final = 3
_COLUMNS: Final[tuple[_Column, ...]] = (
    ("placement", lambda _, row: row.placement),
    ("recipe", _format_variant),
    ("state", format_state),
    ("loss", lambda _, row: format_loss(row.history)),
    ("time", lambda _, row: _format_number(row.seconds, "{:,.1f} s")),
    ("weights", lambda _, row: row.history.weights_sha256[:8]),
    ("same bits", _format_bit_equality),
    ("samples/s", lambda _, row: _format_number(row.samples_per_s, "{:,.0f}")),
    ("speed-up", lambda comparison, row: _format_number(comparison.speed_up(row), "{:.2f}")),
    ("efficiency", lambda comparison, row: _format_number(comparison.efficiency(row), "{:.0%}")),
    ("peak memory", lambda _, row: f"{max(row.peak_bytes) / MIB:,.0f} MiB" if row.peak_bytes else ""),
    ("computing", lambda _, row: _format_time_fraction(row, "computing")),
    ("data", lambda _, row: _format_time_fraction(row, "data")),
    ("waiting", lambda _, row: _format_time_fraction(row, "waiting")),
    ("for a core", lambda _, row: _format_time_fraction(row, "waiting for a core")),
)
