"""A plan has the memory of the run, with all ranks and of one whose peers are pretended."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow("other programs, or minutes")


def test_a_plan_has_the_memory_of_the_run(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "benchmarks", "--only", "plan", "--quick", "--json", str(tmp_path / "found")]
    subprocess.run(line, check=True, stdout=subprocess.DEVNULL)
    memory, seconds, best = json.loads((tmp_path / "found").read_text(encoding="utf-8"))["results"]
    assert [verdict["met"] for verdict in memory["verdicts"]] == [True] * 4
    assert min(row["median"] for row in seconds["rows"]) > 0
    assert best["verdicts"][0]["ratio"] == 1
