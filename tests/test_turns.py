"""In all turns each test of CI runs, at each commit the quick ones, and each program that CI must have is met."""

from collections import Counter
from types import SimpleNamespace
from typing import cast

import pytest
import tiers
import turns


def collected(file: str, names: list[str], marker: str = "") -> list[pytest.Item]:
    def marked(name: str) -> bool:
        return name == marker

    made = [SimpleNamespace(path=tiers.TESTS / file, nodeid=f"::{name}", get_closest_marker=marked) for name in names]
    return [cast("pytest.Item", each) for each in made]


def counted(items: list[pytest.Item], slow: set[str]) -> list[int]:
    """Return how many turns each test is in."""
    found = Counter(item.nodeid for turn in range(turns.TURNS) for item in turns.in_turn(items, slow, turn))
    return [found[item.nodeid] for item in items]


def test_each_test_of_a_slow_file_is_in_one_turn_and_all_others_are_in_each() -> None:
    slow, other = "commands/test_resume.py", "commands/test_eval.py"
    names = ["test_a", "test_b[1]", "test_b[2]", "test_b[3]", "TestC::test_d"]
    assert counted(collected(slow, names), {slow}) == [1] * 5
    in_each = [len(turns.in_turn(collected(slow, names[:4]), {slow}, turn)) for turn in range(turns.TURNS)]
    assert in_each == [1] * turns.TURNS
    assert counted(collected(other, names), {slow}) == [turns.TURNS] * 5
    assert counted(collected(slow, names, "quick"), {slow}) == [turns.TURNS] * 5


def test_what_a_fixture_has_done_once_is_looked_at_by_all_or_by_none() -> None:
    file = "launchers/test_submitted.py"
    found = {
        len(turns.in_turn(collected(file, ["test_a", "test_b", "test_c"]), {file}, turn)) for turn in range(turns.TURNS)
    }
    assert found == {0, 3}


def test_each_program_is_met_in_each_turn() -> None:
    for name in turns.ALWAYS:
        file, _, function = name.partition("::")
        assert counted(collected(file, [function, f"{function}[case]"]), {file}) == [turns.TURNS] * 2
        assert f"def {function}(" in (tiers.TESTS / file).read_text(encoding="utf-8")


@pytest.mark.parametrize("place", turns.WHOLE)
def test_what_a_list_names_is_there(place: str) -> None:
    assert (tiers.TESTS / place).exists()


def test_the_turn_follows_from_the_commit() -> None:
    assert [turns.turn_of(f"{number:08x}" + "f" * 32) for number in range(5)] == [0, 1, 2, 3, 0]
