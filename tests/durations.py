"""Where the time of a test run goes: the seconds of each group of tests, beside those that a file has.

A group is a folder and a tier. `pytest --durations-table PATH` prints the groups, and names each that has grown by
more than GROWTH without its entry in PATH being changed; with `--durations-write` it writes the entries anew instead.
"""

import json
import platform
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import pytest

GROWTH: Final = 1.15
NOISE_S: Final = 10.0  # a group that takes less than this longer is not named: other work moves it by as much
SLOW_S: Final = 20.0  # files that take longer are listed, and started first
TIERS: Final = ("gpu", "real", "commands", "worlds", "pure")  # in the order in which a test's keywords decide
_TESTS: Final = Path(__file__).parent


class Durations:
    """The plugin: adds up what each test took, and reports when all have ended."""

    def __init__(self, table: Path, *, write: bool, whole: bool = True) -> None:
        self._table = table
        self._write = write
        self._whole = whole  # whether all tests of the table run
        self._began = time.monotonic()
        self._groups: defaultdict[str, float] = defaultdict(float)
        self._files: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add one phase of a test: its setup, its call or its teardown."""
        file = Path(report.nodeid.partition("::")[0]).relative_to(_TESTS.name)
        self._groups[group(file, report.keywords)] += report.duration
        self._files[file.as_posix()] += report.duration

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the groups, and compare them with the file or write it."""
        counts = {name: len(terminalreporter.stats.get(name, ())) for name in ("passed", "failed", "error", "skipped")}
        if self._write:
            found = summary(self._groups, self._files, counts, time.monotonic() - self._began)
            self._table.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        before = groups_of(self._table)
        terminalreporter.section("seconds of each group of tests")
        for name, seconds in sorted(self._groups.items(), key=lambda each: -each[1]):
            terminalreporter.write_line(f"{seconds:8.1f}  {before.get(name, 0.0):8.1f} in the table  {name}")
        minutes = (time.monotonic() - self._began) / 60
        terminalreporter.write_line(f"{sum(self._groups.values()):8.1f}  in {minutes:.1f} minutes")
        for line in grown(self._groups, before) if self._whole else ():
            terminalreporter.write_line(f"warning: {line}", yellow=True)


def group(file: Path, keywords: Mapping[str, Any]) -> str:
    """Return the group of a test: the folder of its file and the tier that it is marked with."""
    tier = next(name for name in TIERS if name in keywords)
    return f"{file.parts[0] if len(file.parts) > 1 else '.'} {tier}"


def grown(groups: Mapping[str, float], before: Mapping[str, float]) -> Iterator[str]:
    """Yield a line for each group that takes longer than its entry allows, on a machine of another speed too.

    How fast the machine is follows from all groups together: the median of how much longer each took.
    """
    known = {name: seconds / before[name] for name, seconds in groups.items() if before.get(name, 0.0) >= NOISE_S}
    pace = statistics.median(known.values()) if known else 1.0
    for name, seconds in groups.items():
        allowed = pace * before.get(name, 0.0)
        if seconds > max(GROWTH * allowed, allowed + NOISE_S):
            yield f"{name}: {seconds:.0f} s, expected {allowed:.0f}; make it cheaper, or run scripts/test --write"


def summary(
    groups: Mapping[str, float], files: Mapping[str, float], counts: Mapping[str, int], seconds: float
) -> dict[str, Any]:
    """Return what a table holds: when, of what and on what it was measured, the groups, and the slow files."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=_TESTS, capture_output=True, text=True, check=True
    ).stdout.strip()
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit,
        "versions": {"python": platform.python_version(), **{each: version(each) for each in ("torch", "torchvision")}},
        "minutes": round(seconds / 60, 1),
        **counts,
        "groups": {name: round(took, 1) for name, took in sorted(groups.items())},
        "slow": {name: round(took) for name, took in sorted(files.items(), key=lambda each: -each[1]) if took > SLOW_S},
    }


def groups_of(table: Path) -> dict[str, float]:
    """Return the groups that a table has; none where there is no table yet."""
    return dict(json.loads(table.read_text(encoding="utf-8"))["groups"]) if table.exists() else {}


def slow_of(table: Path) -> dict[str, float]:
    """Return the slow files that a table has, by their paths from the folder of tests."""
    return dict(json.loads(table.read_text(encoding="utf-8"))["slow"]) if table.exists() else {}
