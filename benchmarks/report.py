"""Figures side by side: a ratio is the median over turns, never of two separate runs.

Each ratio has a 95 % confidence interval. If the interval of a target's ratio contains the bound, the verdict is
*undecided*: measure again with more turns, or on a quieter machine.
"""

from __future__ import annotations

import math
import os
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Final, Literal

from rich.console import Console
from rich.table import Table

PACKAGES: Final = (
    *("torch", "torchvision", "numpy", "pillow", "lightning", "accelerate", "deepspeed", "datasets", "pyarrow"),
    *("webdataset", "lockstep-train"),
)
ROOT: Final = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Target:
    """How many times the figure of `against` that of `contestant` is to be: at most for times, at least for speeds."""

    contestant: str
    against: str
    bound: Literal["at most", "at least"]
    times: float


@dataclass(frozen=True)
class Row:
    """One contestant: its median figure, all its turns, and its ratio to the baseline, with the interval."""

    name: str
    median: float
    turns: list[float]
    ratio: float
    interval: tuple[float, float]


@dataclass(frozen=True)
class Verdict:
    """A target, the measured ratio with its interval, and whether it meets the target. None means undecided."""

    target: Target
    ratio: float
    interval: tuple[float, float]
    met: bool | None


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
    rows = [Row(each, statistics.median(own), own, *ratio_of(own, turns[baseline])) for each, own in turns.items()]
    return Result(name, title, unit, baseline, rows, [_judged(target, turns) for target in targets])


def show(result: Result) -> None:
    """Print a result as a table."""
    table = Table(title=result.title, title_justify="left", min_width=100)
    for heading in ("", result.unit, "all turns", f"x {result.baseline}", "95 % interval"):
        table.add_column(heading, justify="right" if heading else "left")
    for row in result.rows:
        spread = f"{_figure(min(row.turns))} to {_figure(max(row.turns))}"
        table.add_row(row.name, _figure(row.median), spread, f"{row.ratio:.3f}", _interval(row.interval))
    console = Console(width=120)
    console.print(table)
    for verdict in result.verdicts:
        console.print(in_words(verdict), highlight=False)
    console.print()


def in_words(verdict: Verdict) -> str:
    """Say a target and whether it is met."""
    target = verdict.target
    wanted = f"{target.contestant}: {target.bound} {target.times:.2f} x {target.against}"
    outcome = "undecided" if verdict.met is None else "met" if verdict.met else "MISSED"
    return f"target: {wanted}; measured {verdict.ratio:.3f} x ({_interval(verdict.interval)}): {outcome}"


def as_json(results: Sequence[Result], load_before: float, quick: bool) -> dict[str, Any]:
    """Return everything that was measured, with the machine and the versions it was measured on.

    `load_before` is the machine's load average before the first measurement: 0 on a quiet one.
    """
    about = machine() | {"load_before": load_before}
    return {"machine": about, "quick": quick, "results": [asdict(result) for result in results]}


def machine() -> dict[str, Any]:
    """Describe this machine, the commit and the versions in use; a package that is not installed has none."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
    }


@cache
def commit() -> str | None:
    """Return the commit of the checkout, and `-dirty` if tracked files differ; None outside a checkout.

    It is of the first call: a benchmark calls it before it measures, and its own JSON may be a tracked file.
    """
    line = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"]
    try:
        return subprocess.run(line, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def ratio_of(own: Sequence[float], base: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """Return the median ratio over the turns, and its 95 % confidence interval.

    The interval is between two order statistics, so it assumes nothing about the distribution: the number of turns
    below the true median is binomial. With fewer than six turns no such interval exists, and it is the whole range.
    """
    ratios = sorted(a / b for a, b in zip(own, base, strict=True))
    count, below, rank = len(ratios), 0.0, 0
    while 2 * (below + math.comb(count, rank) / 2**count) <= 0.05:
        below += math.comb(count, rank) / 2**count
        rank += 1
    first = max(rank, 1) - 1
    return statistics.median(ratios), (ratios[first], ratios[-1 - first])


def _interval(interval: tuple[float, float]) -> str:
    return f"{interval[0]:.3f} to {interval[1]:.3f}"


def _judged(target: Target, turns: Mapping[str, list[float]]) -> Verdict:
    ratio, interval = ratio_of(turns[target.contestant], turns[target.against])
    low, high = interval
    meets, misses = (high <= target.times, low > target.times)
    if target.bound == "at least":
        meets, misses = (low >= target.times, high < target.times)
    return Verdict(target, ratio, interval, None if not meets and not misses else meets)


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
