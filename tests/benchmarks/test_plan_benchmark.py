"""A rank with pretended peers takes the memory that it takes beside real ones."""

import json
import subprocess
import sys
from pathlib import Path


def test_a_plan_has_the_memory_of_all_ranks(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "benchmarks", "--only", "plan", "--quick", "--json", str(tmp_path / "found")]
    subprocess.run(line, check=True, stdout=subprocess.DEVNULL)
    memory, seconds = json.loads((tmp_path / "found").read_text(encoding="utf-8"))["results"]
    assert [verdict["met"] for verdict in memory["verdicts"]] == [True, True]
    assert min(row["median"] for row in seconds["rows"]) > 0
