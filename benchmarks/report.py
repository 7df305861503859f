"""Figures side by side: a ratio is the median over turns, never of two separate runs."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Final, Literal

from rich.console import Console
from rich.table import Table

PACKAGES: Final = ("torch", "torchvision", "numpy", "pillow", "lightning", "accelerate", "deepspeed", "lockstep-train")


@dataclass(frozen=True)
class Target:
    """How many times the figure of `against` that of `contestant` is to be: at most for times, at least for speeds."""

    contestant: str
    against: str
    bound: Literal["at most", "at least"]
    times: float


@dataclass(frozen=True)
class Row:
    """One contestant: its median figure, all its turns, and how many times the baseline's figure it has."""

    name: str
    median: float
    turns: list[float]
    ratio: float


@dataclass(frozen=True)
class Verdict:
    """A target, the ratio that was measured, and whether it meets the target."""

    target: Target
    ratio: float
    met: bool


@dataclass(frozen=True)
class Result:
    """One comparison; `unit` says what the figures are."""

    name: str
    title: str
    unit: str
    baseline: str
    rows: list[Row]
    verdicts: list[Verdict]


def compare(
    name: str, title: str, unit: str, turns: Mapping[str, list[float]], baseline: str, targets: Sequence[Target] = ()
) -> Result:
    """Make a result of each contestant's turns: figure i of all of them was measured in the same round."""
    rows = [Row(each, statistics.median(own), own, _ratio(own, turns[baseline])) for each, own in turns.items()]
    return Result(name, title, unit, baseline, rows, [_judged(target, turns) for target in targets])


def show(result: Result) -> None:
    """Print a result as a table."""
    table = Table(title=result.title, title_justify="left", min_width=100)
    for heading in ("", result.unit, "all turns", f"x {result.baseline}"):
        table.add_column(heading, justify="right" if heading else "left")
    for row in result.rows:
        spread = f"{_figure(min(row.turns))} to {_figure(max(row.turns))}"
        table.add_row(row.name, _figure(row.median), spread, f"{row.ratio:.3f}")
    console = Console(width=120)
    console.print(table)
    for verdict in result.verdicts:
        console.print(in_words(verdict), highlight=False)
    console.print()


def in_words(verdict: Verdict) -> str:
    """Say a target and whether it is met."""
    target = verdict.target
    wanted = f"{target.contestant}: {target.bound} {target.times:.2f} x {target.against}"
    return f"target: {wanted}; measured {verdict.ratio:.3f} x: {'met' if verdict.met else 'MISSED'}"


def as_json(results: Sequence[Result], load_before: float, quick: bool) -> dict[str, Any]:
    """Return everything that was measured, with the machine and the versions it was measured on.

    `load_before` is the machine's load average before the first measurement: 0 on a quiet one.
    """
    about = machine() | {"load_before": load_before}
    return {"machine": about, "quick": quick, "results": [asdict(result) for result in results]}


def machine() -> dict[str, Any]:
    """Describe this machine and the versions in use; a package that is not installed has none."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
    }


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _ratio(own: Sequence[float], base: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(own, base, strict=True))


def _judged(target: Target, turns: Mapping[str, list[float]]) -> Verdict:
    ratio = _ratio(turns[target.contestant], turns[target.against])
    return Verdict(target, ratio, ratio <= target.times if target.bound == "at most" else ratio >= target.times)


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
