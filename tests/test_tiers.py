"""The lists of the tiers name what is there, and plain pytest runs no test that is not quick."""

import os
import re
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import tiers
from pairs import pairs


@pytest.mark.parametrize(
    "place",
    [
        *tiers._REAL,
        *tiers._COMMANDS,
        *tiers._QUICK,
        *tiers._SOME_QUICK,
        *tiers._CLUSTERS,
    ],
)
def test_what_a_list_names_is_there(place: str) -> None:
    assert (tiers.TESTS / place).exists()


@pytest.mark.parametrize(
    ("place", "marker", "expected", "quick"),
    [
        ("core/test_tree.py", None, "pure", True),
        ("core/test_tree.py", "worlds", "worlds", False),
        ("parallel/test_data_parallel.py", "worlds", "worlds", True),
        ("commands/test_eval.py", None, "commands", False),
        ("commands/test_strategies_train.py", "quick", "commands", True),
        ("commands/test_eval.py", "worlds", "commands", False),
        ("faults/test_faults.py", None, "real", False),
        ("core/test_tree.py", "gpu", "gpu", False),
        ("core/test_tree.py", "commands", "commands", False),
        ("core/test_tree.py", "extended", "pure", False),
        ("core/test_tree.py", "thorough", "pure", False),
        ("loop/test_guard.py", None, "commands", True),
        ("loop/test_guard.py", "extended", "commands", False),
    ],
)
def test_the_tier_follows_from_place_and_marker(place: str, marker: str | None, expected: str, quick: bool) -> None:
    stands = SimpleNamespace(path=tiers.TESTS / place, get_closest_marker=lambda name: name == marker)
    assert tiers.tier(cast("pytest.Item", stands)) == expected
    assert tiers.is_quick(cast("pytest.Item", stands)) == quick


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "-m not extended --durations-table=tests/durations.json"),
        (["--write"], "-m not extended --durations-table=tests/durations.json --durations-write"),
        (["--turn"], "-m not extended --durations-table=tests/durations.json --turn-of 0123"),
        # Without an expression of markers, pytest would take that of the quick tests.
        (["--all"], "-m extended or not extended --durations-table=benchmarks/results/tests.json --durations-write"),
    ],
)
@pytest.mark.parametrize("code", [0, 1])
def test_the_script_asks_for_the_gate_or_for_all(tmp_path: Path, words: list[str], expected: str, code: int) -> None:
    for folder in ("scripts", "bin"):
        (tmp_path / folder).mkdir()
    (tmp_path / "bin" / "git").write_text("#!/bin/sh\necho 0123\n")
    (tmp_path / "bin" / "git").chmod(0o755)
    shutil.copy(tiers.TESTS.parent / "scripts" / "test", tmp_path / "scripts")
    stand_in = tmp_path / "bin" / "pytest"
    stand_in.write_text(f'#!/bin/sh\necho "$@"\nexit {code}\n')
    stand_in.chmod(0o755)
    environment = {"PATH": f"{stand_in.parent}:{os.environ['PATH']}"}
    line = [tmp_path / "scripts" / "test", *words]
    done = subprocess.run(line, env=environment, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert done.stdout == f"{expected} --numprocesses 3 --no-loadscope-reorder\n"


@pytest.mark.parametrize(("names", "placements"), [("abcde", [1, 2, 3]), ("ab", [1, 2, 3, 4]), ("abc", [1, 2, 3])])
def test_of_pairs_the_gate_has_each_case_and_each_placement(names: str, placements: list[int]) -> None:
    found = pairs([*names], placements)
    assert [each.values for each in found] == [*product(names, placements)]
    gate = [each.values for each in found if not each.marks]
    assert len(gate) == max(len(names), len(placements))
    assert ({name for name, _ in gate}, {number for _, number in gate}) == ({*names}, {*placements})


def test_clusters_start_first_and_then_what_takes_longest() -> None:
    places = ["core/test_tree.py", "core/test_mesh.py", "launchers/test_real.py"]
    items = [cast("pytest.Item", SimpleNamespace(path=tiers.TESTS / place)) for place in places]
    found = tiers.ordered(items, {"core/test_mesh.py": 30.0})
    assert [item.path.name for item in found] == ["test_real.py", "test_mesh.py", "test_tree.py"]


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("core/test_tree.py", True),
        ("commands/test_strategies_train.py", True),
        ("commands/test_eval.py", False),
        ("faults/test_faults.py", False),
    ],
)
def test_files_that_plain_pytest_need_not_import(place: str, expected: bool) -> None:
    assert tiers.may_be_quick(tiers.TESTS / place) == expected


@pytest.mark.commands
def test_plain_pytest_runs_quick_tests_some_at_a_time_and_says_what_it_left_out() -> None:
    """In the end; a process that starts such processes in turn, without end, is noticed by its time."""
    places = "testpaths=tests/common/test_type_name.py tests/core/test_work.py tests/commands/test_eval.py"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    line = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-o", places]
    done = subprocess.run(line, cwd=tiers.TESTS.parent, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^3 workers \[\d+ items\]$", done.stdout, re.MULTILINE)
    assert "these were the quick tests; scripts/test runs all" in done.stdout
