"""The lists of the tiers name what is there, and plain pytest runs no test that is not quick."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import tiers


@pytest.mark.parametrize("place", [*tiers._REAL, *tiers._ALONE, *tiers._COMMANDS, *tiers._QUICK, *tiers._SOME_QUICK])
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
    ],
)
def test_the_tier_follows_from_place_and_marker(place: str, marker: str | None, expected: str, quick: bool) -> None:
    stands = SimpleNamespace(path=tiers.TESTS / place, get_closest_marker=lambda name: name == marker)
    assert tiers.tier(cast("pytest.Item", stands)) == expected
    assert tiers.is_quick(cast("pytest.Item", stands)) == quick
    assert tiers.is_alone(cast("pytest.Item", stands)) == place.startswith("faults")


def test_what_runs_alone_is_real() -> None:
    """Otherwise scripts/test would run it twice."""
    assert {*tiers._ALONE} <= {*tiers._REAL}


@pytest.mark.parametrize(("fails", "expected"), [("none", 0), ("not real", 1), ("real and not alone", 1), ("alone", 1)])
def test_the_script_for_all_tests_fails_where_a_part_of_them_does_and_else_succeeds(
    tmp_path: Path, fails: str, expected: int
) -> None:
    for folder in ("scripts", "bin"):
        (tmp_path / folder).mkdir()
    shutil.copy(tiers.TESTS.parent / "scripts" / "test", tmp_path / "scripts")
    stand_in = tmp_path / "bin" / "pytest"
    stand_in.write_text('#!/bin/sh\necho "tests that are $2"\n[ "$2" != "$FAILS" ]\n')
    stand_in.chmod(0o755)
    environment = {"PATH": f"{stand_in.parent}:{os.environ['PATH']}", "FAILS": fails}
    done = subprocess.run([tmp_path / "scripts" / "test"], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == expected, done.stderr
    assert set(done.stdout.splitlines()) == {
        f"tests that are {part}" for part in ("not real", "real and not alone", "alone")
    }


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
def test_plain_pytest_runs_quick_tests_two_at_a_time_and_says_what_it_left_out() -> None:
    """In the end; a process that starts such processes in turn, without end, is noticed by its time."""
    places = "testpaths=tests/core/test_kinds.py tests/core/test_work.py tests/commands/test_eval.py"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    line = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-o", places]
    done = subprocess.run(line, cwd=tiers.TESTS.parent, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 workers [9 items]" in done.stdout
    assert "these were the quick tests; scripts/test runs all" in done.stdout
