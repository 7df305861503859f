"""What the usual script made of a recipe, beside what it prints and beside the recipe itself."""

from __future__ import annotations

from typing import Final

from lockstep.reporting import wording
from lockstep.reporting.comparison import Comparison, Row
from lockstep.reporting.run_log import count

USUAL: Final = "usual script"  # run/usual.py, as a strategy of a comparison
PRINTED: Final = "printed "  # before the names of the figures that it prints, in its log
OF_ALL: Final = "loss of all ranks"  # where it prints rank 0's
_LOSS: Final = "loss/validation"

NOTE: Final = (
    "Its batch is that of a process, so more processes take larger and fewer steps at the same rate. The loss that it "
    "prints is rank 0's, the mean over its last epoch; its figures are means of the ranks', over padded shares of the "
    "validation samples."
)


def cells(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """Return the headings and the words of each row; there are none where the usual script did not run."""
    done = [row for row in comparison.rows if row.strategy == USUAL and row.state == "done"]
    figure = monitored(comparison)
    headings = ["usual script", "batch of a step", "updates", "training loss that it prints", "of all ranks"]
    headings += [f"{figure} that it prints", f"{figure} of each sample once", f"{figure} of the recipe"]
    return headings, [
        [
            row.label.removeprefix(f"{USUAL} "),
            f"{count(row.history.started, 'batch') or 0:,}",
            f"{count(row.history.started, 'steps') or 0:,}",
            _words(row, f"{PRINTED}loss/train"),
            _words(row, OF_ALL),
            _words(row, f"{PRINTED}{figure}/validation", figure),
            _words(row, curve(figure), figure),
            _words(comparison.reference(row), curve(figure), figure),
        ]
        for row in done
    ]


def monitored(comparison: Comparison) -> str:
    """Return the figure by which runs of the recipe are judged."""
    return next((row.history.monitor for row in comparison.rows if row.history.started), "loss")


def curve(figure: str) -> str:
    """Return the curve of a figure of evaluations."""
    return _LOSS if figure == "loss" else figure


def _words(row: Row | None, name: str, figure: str = "") -> str:
    value = row.history.last_of(name) if row else None
    return "" if row is None or value is None else wording.figure(value, figure in row.history.fractions)
