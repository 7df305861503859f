"""Plain pytest runs no slow test, and what starts a cluster waits for the other clusters."""

import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import marks
import pytest
from pairs import pairs
from queued import CLUSTERS, Queue

ONE_LINE = 'import pytest\n\npytestmark = pytest.mark.slow("minutes")\n'
SEVERAL = 'import pytest\n\npytestmark = [\n    pytest.mark.slow("minutes"),\n    pytest.mark.cluster,\n]\n'


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (ONE_LINE, {"slow"}),
        (SEVERAL, {"slow", "cluster"}),
        ("pytestmark = pytest.mark.worlds\n\n\n@pytest.mark.slow('ranks')\ndef test_a(): ...\n", {"worlds"}),
        ("SLOW = pytest.mark.slow('minutes')\n", set()),
        ("", set()),
    ],
)
def test_markers_of_a_file_are_read_without_importing_it(source: str, expected: set[str], tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(source, encoding="utf-8")
    assert marks.marks_of(tmp_path / "test_a.py") == expected


def test_a_folder_has_no_markers(tmp_path: Path) -> None:
    assert marks.marks_of(tmp_path) == set()


def test_clusters_start_first_and_then_what_takes_longest() -> None:
    places = ["core/test_tree.py", "core/test_mesh.py", "launchers/test_real.py"]
    items = [cast("pytest.Item", SimpleNamespace(path=marks.TESTS / place)) for place in places]
    found = marks.in_order(items, {"test_mesh.py": 30.0, "test_tree.py": 1.0, "test_real.py": 0.0}.__getitem__)
    assert [item.path.name for item in found] == ["test_real.py", "test_mesh.py", "test_tree.py"]


@pytest.mark.parametrize(
    ("test", "expected"),
    [
        ("tests/launchers/test_real.py::test_mpich", CLUSTERS),
        ("tests/faults/test_faults.py::test_a", CLUSTERS),
        ("tests/launchers/test_detect.py::test_b", "tests/launchers/test_detect.py"),
        ("tests/core/test_tree.py::test_c", "tests/core/test_tree.py"),
    ],
)
def test_clusters_run_one_after_another_and_others_by_file(test: str, expected: str) -> None:
    assert Queue._split_scope(cast("Queue", None), test) == expected


@pytest.mark.parametrize(("names", "placements"), [("abcde", [1, 2, 3]), ("ab", [1, 2, 3, 4]), ("abc", [1, 2, 3])])
def test_of_pairs_those_not_slow_have_each_case_and_each_placement(names: str, placements: list[int]) -> None:
    found = pairs([*names], placements)
    assert [each.values for each in found] == [*product(names, placements)]
    first = [each.values for each in found if not each.marks]
    assert len(first) == max(len(names), len(placements))
    assert ({name for name, _ in first}, {number for _, number in first}) == ({*names}, {*placements})


@pytest.mark.slow("starts a Python of its own")
def test_plain_pytest_runs_quick_tests_some_at_a_time_and_says_what_it_left_out() -> None:
    """In the end; a process that starts such processes in turn, without end, is noticed by its time."""
    places = "testpaths=tests/common/test_type_name.py tests/core/test_work.py tests/commands/test_eval.py"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    line = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-o", places]
    done = subprocess.run(line, cwd=marks.TESTS.parent, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^3 workers \[\d+ items\]$", done.stdout, re.MULTILINE)
    assert "these were the quick tests; scripts/test adds the slow ones" in done.stdout
