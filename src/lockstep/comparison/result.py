"""What came of one recipe under several placements: as a table for people, and as JSON."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Literal

from rich.console import Console, RenderableType

from lockstep.reporting import wording
from lockstep.reporting.run_log import History, best, by_rank, count, peaks
from lockstep.reporting.run_view import loss
from lockstep.reporting.terminal import table

State = Literal["waiting", "running", "done", "failed"]

# The parts of the seconds of training that a table has, by what Done calls them; `training` is all of them, undivided.
PARTS: Final = ("computing", "data", "waiting", "waiting for a core")
_TRAINING: Final = (*PARTS, "training")
MIB: Final = 1 << 20
_NOTHING: Final = {"", "done", "1.00", "100%", "0%"}  # what says nothing where all of a column is one of these
_STYLES: Final = {"waiting": "dim", "running": "green", "failed": "red"}


@dataclass(frozen=True)
class ResultRow:
    """One placement of a recipe, and its run in `folder`; one of the `rows` of a `Comparison`.

    `variant` has the override by which its recipe differs from the one that was given, and of that one what it has for
    those keys; `promises` what the strategy promises (bits, close or none), and `reason` why a run failed. `step`,
    `steps` and `left_s` are of one under way.
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
        """The placement in words."""
        return f"{self.strategy} on {self.processes}"

    @property
    def label(self) -> str:
        """The placement in words, and what its recipe differs in."""
        return f"{self.placement}, {self.variant}" if self.variant else self.placement

    @property
    def seconds(self) -> float | None:
        """From the first step to the end, evaluating and saving included; of a resumed run, all starts together."""
        return self.history.seconds if self.state == "done" else None

    @property
    def spent(self) -> dict[str, list[float]]:
        """What the seconds of each rank went to in the last start."""
        return by_rank(self.history.last)

    @property
    def peak_bytes(self) -> list[float]:
        """The most memory that each rank had, in bytes."""
        return peaks(self.history.last)

    @property
    def samples_per_s(self) -> float | None:
        """Samples a second of training in the last start, without setting up, evaluating and saving."""
        seconds = sum(self.spent[what][0] for what in _TRAINING if what in self.spent)
        end, begin = count(self.history.last, "samples"), count(self.history.started, "samples")
        if self.state != "done" or not seconds or end is None or begin is None or end <= begin:
            return None
        return (end - begin) / seconds

    def part(self, name: str) -> float | None:
        """Return which fraction of the seconds of training, of all ranks, went to this; None where nobody knows."""
        whole = sum(sum(self.spent.get(each, ())) for each in PARTS)
        return sum(self.spent.get(name, ())) / whole if whole else None


@dataclass(frozen=True)
class Comparison:
    """The result of `compare`: a row for each placement, in the order in which they ran, and the machine in words."""

    recipe: str
    rows: tuple[ResultRow, ...]
    machine: str = ""

    def reference(self, row: ResultRow) -> ResultRow | None:
        """Return one process of the same recipe, with which a row is compared; None where that is not done."""
        found = [each for each in self.rows if each.variant == row.variant and each.strategy == "single"]
        return found[0] if found and found[0].state == "done" else None

    def speed_up(self, row: ResultRow) -> float | None:
        """Return how many times the throughput of one process a row has."""
        reference = self.reference(row)
        ours, theirs = row.samples_per_s, reference.samples_per_s if reference else None
        return ours / theirs if ours and theirs else None

    def efficiency(self, row: ResultRow) -> float | None:
        """Return the speed-up for each process."""
        speed_up = self.speed_up(row)
        return None if speed_up is None else speed_up / row.processes

    def same_bits(self, row: ResultRow) -> bool | None:
        """Return whether the weights are those of one process; None where one of the two is missing."""
        reference, own = self.reference(row), row.history.weights_sha256
        return own == reference.history.weights_sha256 if reference and own else None

    @property
    def broken(self) -> list[ResultRow]:
        """The placements that promise the bits of one process, and have others."""
        return [row for row in self.rows if row.promises == "bits" and self.same_bits(row) is False]

    @property
    def done(self) -> list[ResultRow]:
        """The placements that were trained to their end."""
        return [row for row in self.rows if row.state == "done"]

    @property
    def figure(self) -> str:
        """The figure by which runs of the recipe are judged."""
        return next((row.history.monitor for row in self.rows if row.history.started), "loss")

    @property
    def failed(self) -> list[ResultRow]:
        """The placements that failed."""
        return [row for row in self.rows if row.state == "failed"]

    @property
    def left_s(self) -> float | None:
        """The seconds left: of the run under way, and of those to come as much as the others took on average."""
        taken = [row.seconds for row in self.rows if row.seconds is not None]
        running = [row for row in self.rows if row.state == "running"]
        if any(row.left_s is None for row in running):
            return None
        now = [row.history.seconds + (row.left_s or 0) for row in running]
        waiting = sum(row.state == "waiting" for row in self.rows)
        if waiting and not taken + now:
            return None
        mean = sum(taken + now) / len(taken + now) if waiting else 0.0
        return sum(row.left_s or 0 for row in running) + waiting * mean


_Column = tuple[str, Callable[[Comparison, ResultRow], str]]  # a heading, and what stands below it


def columns(comparison: Comparison) -> dict[str, list[str]]:
    """Return the words of all rows by headings, the most important first; columns that say nothing are left out."""
    rows = [row if row.state == "done" else replace(row, history=History()) for row in comparison.rows]
    names = dict.fromkeys(row.history.figure.name for row in rows if row.history.figure)
    figures: list[_Column] = [(name, partial(_figure, name)) for name in names]
    asked = [*_COLUMNS[:_FIGURES_AT], *figures, *_COLUMNS[_FIGURES_AT:]]
    found = [(heading, [cell(comparison, row) for row in rows]) for heading, cell in asked]
    found.insert(_FIGURES_AT + len(names), ("best", best([row.history for row in rows])))
    return {heading: words for heading, words in found if len({*words} - {""}) > 1 or {*words} - _NOTHING}


def drawing(comparison: Comparison, console: Console) -> RenderableType:
    """Return the table for a terminal."""
    styles = [_STYLES.get(row.state, "") for row in comparison.rows]
    return table(console, columns(comparison), styles, ("placement", "recipe", "state"))


def conclusion(comparison: Comparison) -> list[str]:
    """Return the lines below the table: what failed, and what broke a promise."""
    lines = [f"{row.label} failed: {row.reason}" for row in comparison.failed]
    return lines + [
        f"{row.label} has other weights than one process, and strategy {row.strategy} promises the same bits; "
        f"lockstep verify finds the first difference"
        for row in comparison.broken
    ]


def to_json(comparison: Comparison) -> str:
    """Write all figures of the rows as JSON; None stands for what is not known."""
    rows = [_plain(comparison, row) for row in comparison.rows]
    return json.dumps({"recipe": comparison.recipe, "machine": comparison.machine, "rows": rows}, indent=1) + "\n"


def _plain(comparison: Comparison, row: ResultRow) -> dict[str, Any]:
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


def state(comparison: Comparison, row: ResultRow) -> str:
    """Say how far a row is."""
    if row.state != "running":
        return row.state
    left = "" if row.left_s is None else f", {wording.duration(row.left_s)} left"
    return f"step {row.step:,}/{row.steps:,}{left}" if row.steps else "starting"


def _same(comparison: Comparison, row: ResultRow) -> str:
    same = comparison.same_bits(row)
    if same is None or row is comparison.reference(row):
        return ""
    return "yes" if same else "no" if row.promises == "bits" else f"no ({row.promises})".replace("none", "not promised")


def _figure(name: str, _: Comparison, row: ResultRow) -> str:
    figure = row.history.figure
    return wording.figure(figure.value, figure.is_fraction) if figure and figure.name == name else ""


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _percent(row: ResultRow, name: str) -> str:
    return _number(row.part(name), "{:.0%}")


_FIGURES_AT: Final = 3
_COLUMNS: Final[tuple[_Column, ...]] = (
    ("placement", lambda _, row: row.placement),
    ("recipe", lambda _, row: row.variant),
    ("state", state),
    ("loss", lambda _, row: loss(row.history)),
    ("time", lambda _, row: _number(row.seconds, "{:,.1f} s")),
    ("weights", lambda _, row: row.history.weights_sha256[:8]),
    ("same bits", _same),
    ("samples/s", lambda _, row: _number(row.samples_per_s, "{:,.0f}")),
    ("speed-up", lambda all_, row: _number(all_.speed_up(row), "{:.2f}")),
    ("efficiency", lambda all_, row: _number(all_.efficiency(row), "{:.0%}")),
    ("peak memory", lambda _, row: f"{max(row.peak_bytes) / MIB:,.0f} MiB" if row.peak_bytes else ""),
    ("computing", lambda _, row: _percent(row, "computing")),
    ("data", lambda _, row: _percent(row, "data")),
    ("waiting", lambda _, row: _percent(row, "waiting")),
    ("for a core", lambda _, row: _percent(row, "waiting for a core")),
)
