"""Figures side by side: contestants take turns, and a ratio is the median over turns, never of two separate runs."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

PACKAGES = ("torch", "torchvision", "numpy", "pillow", "lightning", "accelerate", "lockstep-train")


@dataclass(frozen=True)
class Row:
    """One contestant: its median figure, all its turns, and how many times the baseline's figure it has."""

    name: str
    median: float
    turns: list[float]
    ratio: float


@dataclass(frozen=True)
class Result:
    """One comparison. `target` is in words, `met` whether the figures meet it; None where there is none."""

    title: str
    unit: str
    baseline: str
    rows: list[Row]
    target: str
    met: bool | None


def compare(
    title: str,
    unit: str,
    turns: Mapping[str, list[float]],
    baseline: str,
    target: str = "",
    met: Callable[[Mapping[str, float]], bool] | None = None,
) -> Result:
    """Make a result of each contestant's turns; `met` is asked with the ratio of each to the baseline."""
    base = turns[baseline]
    rows = [
        Row(
            name,
            statistics.median(own),
            own,
            statistics.median(a / b for a, b in zip(own, base, strict=True)),
        )
        for name, own in turns.items()
    ]
    ratios = {row.name: row.ratio for row in rows}
    return Result(title, unit, baseline, rows, target, met(ratios) if met else None)


def take_turns(contestants: Mapping[str, Callable[[], float]], turns: int) -> dict[str, list[float]]:
    """Let each contestant measure itself once a turn, after one turn that does not count."""
    for measure in contestants.values():
        measure()
    figures: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(turns):
        for name, measure in contestants.items():
            figures[name].append(measure())
    return figures


def show(result: Result) -> None:
    """Print a result as a table."""
    table = Table(title=result.title, title_justify="left")
    for heading in ("", result.unit, "slowest and fastest turn", f"x {result.baseline}"):
        table.add_column(heading, justify="left" if not heading else "right")
    for row in result.rows:
        spread = f"{min(row.turns):,.4g} to {max(row.turns):,.4g}"
        table.add_row(row.name, f"{row.median:,.4g}", spread, f"{row.ratio:.3f}")
    console = Console(width=110)
    console.print(table)
    if result.target:
        console.print(f"target: {result.target}: {'met' if result.met else 'MISSED'}\n", highlight=False)


def as_json(results: list[Result]) -> dict[str, Any]:
    """Return everything that was measured, with the machine and the versions it was measured on."""
    return {"machine": machine(), "results": [asdict(result) for result in results]}


def machine() -> dict[str, Any]:
    """Describe this machine and the versions in use."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "packages": {name: metadata.version(name) for name in PACKAGES},
    }


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
