"""How long the files of tests take: a table to plan with, written by `scripts/test --all`.

A file is known by its name alone, which no other has, so that it may move. What is not in the table takes UNKNOWN_S.
"""

import json
import platform
import subprocess
import time
from collections import defaultdict
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import pytest

TABLE: Final = Path(__file__).with_name("durations.json")
UNKNOWN_S: Final = 5.0  # half of the files with slow tests take less
_FINISHED: Final = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)  # no file was interrupted


class Durations:
    """The plugin: adds up what each test took, prints the sums, and writes them to `table` if it is given."""

    def __init__(self, table: Path | None = None) -> None:
        self._table = table
        self._began = time.monotonic()
        self._seconds: defaultdict[Path, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add one phase of a test: its setup, its call or its teardown."""
        file = Path(report.nodeid.partition("::")[0])
        self._seconds[file.relative_to(TABLE.parent.name)] += report.duration

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, exitstatus: pytest.ExitCode) -> None:
        """Print the seconds of each folder, and write the table."""
        taken_s = time.monotonic() - self._began
        terminalreporter.section("seconds of each folder of tests")
        for name, seconds in by_folder(self._seconds).items():
            terminalreporter.write_line(f"{seconds:8.1f}  {name}")
        terminalreporter.write_line(f"{sum(self._seconds.values()):8.1f}  in {taken_s / 60:.1f} minutes")
        if self._table is not None and exitstatus in _FINISHED:
            counts = {name: len(terminalreporter.stats.get(name, ())) for name in ("passed", "failed", "skipped")}
            table = summary({path.name: seconds for path, seconds in self._seconds.items()}, counts, taken_s)
            self._table.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


def by_folder(seconds: Mapping[Path, float]) -> dict[str, float]:
    """Return the sum of each folder, the longest first."""
    sums: defaultdict[str, float] = defaultdict(float)
    for file, taken in seconds.items():
        sums[file.parts[0] if len(file.parts) > 1 else "."] += taken
    return dict(sorted(sums.items(), key=lambda each: -each[1]))


def summary(seconds: Mapping[str, float], counts: Mapping[str, int], taken_s: float) -> dict[str, Any]:
    """Return what a table holds: when, of what and on what it was measured, and the seconds of each file."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=TABLE.parent, capture_output=True, text=True, check=True
    ).stdout.strip()
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit,
        "versions": {"python": platform.python_version(), **{each: version(each) for each in ("torch", "torchvision")}},
        "minutes": round(taken_s / 60, 1),
        **counts,
        # A file that takes less than 0.05 s must not count as one without a time.
        "seconds": {
            name: max(0.1, round(taken, 1)) for name, taken in sorted(seconds.items(), key=lambda each: -each[1])
        },
    }


def seconds_of_files(table: Path = TABLE) -> dict[str, float]:
    """Return the seconds of each file that a table has, by the file's name; none if there is no table."""
    return dict(json.loads(table.read_text(encoding="utf-8"))["seconds"]) if table.exists() else {}
