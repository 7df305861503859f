"""The table of scripts/mutants: its changes are code, and the script names those whose line was edited."""

import shlex
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
from component import script

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def mutants() -> ModuleType:
    return script("mutants")


def test_most_lines_are_there_and_what_they_become_is_code(mutants: ModuleType) -> None:
    changes, lost = mutants.made_and_lost(mutants.changes())
    assert len(changes) > 5 * len(lost), "\n".join(lost)
    assert not [each for each, count in Counter((each.file, each.line) for each in changes).items() if count > 1]
    for each in changes:
        source = (ROOT / "src/lockstep" / each.file).read_text(encoding="utf-8")
        assert compile(mutants.changed(source, each), each.file, "exec"), each
        assert each.becomes != each.line, each


def test_the_tests_are_there(mutants: ModuleType) -> None:
    for tests in {each.tests for each in mutants.changes()}:
        words = shlex.split(tests)
        files = words[: words.index("-k")] if "-k" in words else words
        assert files
        assert all((ROOT / file).exists() for file in files), tests


def test_a_line_that_is_not_there_or_twice_is_an_error(mutants: ModuleType) -> None:
    change = mutants.Change("a.py", "x = 1", "x = 2", "")
    assert mutants.changed("if y:\n    x = 1\n", change) == "if y:\n    x = 2\n"
    for source in ("x = 2\n", "x = 1\nx = 1\n"):
        with pytest.raises(ValueError, match=r"lines are 'x = 1'; give another one in scripts/mutants\.yaml"):
            mutants.changed(source, change)


def test_a_change_that_cannot_be_made_is_named_and_the_others_are_made(mutants: ModuleType) -> None:
    [there, *_] = mutants.changes()
    edited, gone = (mutants.Change(file, "no such line", "x", "") for file in (there.file, "core/gone.py"))
    chosen, lost = mutants.made_and_lost([edited, there, gone])
    assert chosen == [there]
    assert [each.partition(":")[0] for each in lost] == [there.file, "core/gone.py"]
