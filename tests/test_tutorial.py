"""The tutorial: every lesson runs by the commands on top of its scripts, and prints what its pages show.

Those that need more than Python are run by test_tutorial_real.py.
"""

import re
import shlex
from functools import partial
from pathlib import Path
from typing import Final

import pytest
from click.testing import CliRunner
from component import require_etcd
from lessons import LESSONS, TUTORIAL, check_what_is_printed, comparable, lessons, needs, on_top, shown

from lockstep.cli import main

pytestmark = pytest.mark.slow("runs whole commands")

SCRIPTS: Final = sorted(TUTORIAL.glob("*/*.py"))
LANGUAGES: Final = ("README.md", "README.zh.md")
LONGEST_SCRIPT, LONGEST_PAGE = 100, 60

_TRAINS = re.compile(r"\blockstep (?:train|verify) ((?:[^|]|\n)*?)(?: --steps.*?)?(?: \||$)")
_RUN = re.compile(r"\bruns/[\w-]+")
_LINK = re.compile(r"\]\(([^)\s]+)\)")


@pytest.mark.parametrize(("lesson", "ours"), lessons(*(each for each in LESSONS if not needs(each))))
def test_a_lesson_prints_what_its_page_shows(lesson: Path, ours: bool, tmp_path: Path) -> None:
    check_what_is_printed(lesson, ours, tmp_path)


def test_the_recipes_and_overrides_of_lessons_are_taken() -> None:
    pages = [(lesson / LANGUAGES[0]).read_text(encoding="utf-8") for lesson in LESSONS]
    found = [words for page in pages for command, _ in shown(page) for words in _TRAINS.findall(command)]
    assert len(found) > 8
    for words in found:
        done = CliRunner().invoke(main, ["show", *shlex.split(words.replace("\\\n", " "))])
        assert done.exit_code == 0, (words, done.output)


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.name)
def test_a_lesson_has_a_page_in_both_languages_that_shows_the_same(lesson: Path) -> None:
    pages = [(lesson / name).read_text(encoding="utf-8") for name in LANGUAGES]
    assert shown(pages[0]) == shown(pages[1])
    assert all(len(page.splitlines()) <= LONGEST_PAGE for page in pages)
    commands = {command for command, _ in shown(pages[0])}
    scripts = list(lesson.glob("*.py"))
    assert commands >= {command for script in scripts for command in on_top(script)} > set()
    for name, other, page in zip(LANGUAGES, reversed(LANGUAGES), pages, strict=True):
        assert {other, f"../{name}", *(script.name for script in scripts)} <= set(_LINK.findall(page))
        index = (TUTORIAL / name).read_text(encoding="utf-8")
        assert f"{lesson.name}/{name}" in _LINK.findall(index)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_script_is_short_and_starts_with_its_command(script: Path) -> None:
    assert len(script.read_text(encoding="utf-8").splitlines()) <= LONGEST_SCRIPT
    assert on_top(script)
    assert all(f"tutorial/{script.relative_to(TUTORIAL)}" in command for command in on_top(script))


def test_no_two_lessons_share_a_run_folder() -> None:
    """Who goes through them in order would find there the run of an earlier lesson."""
    folders = [
        {
            each
            for command, _ in shown((lesson / "README.md").read_text(encoding="utf-8"))
            for each in _RUN.findall(command)
        }
        for lesson in LESSONS
    ]
    assert sum(map(len, folders)) == len(set[str]().union(*folders)) > 10


def test_lessons_are_numbered_one_by_one() -> None:
    folders = {path.parent for path in TUTORIAL.glob("*/*.*")}
    assert folders == set(LESSONS)
    assert [int(lesson.name[:2]) for lesson in LESSONS] == list(range(1, len(LESSONS) + 1))


def test_commands_and_their_lines_are_read_from_a_page() -> None:
    page = "a\n```console\n$ one\nx 1.5 s\ny\n$ two; \\\n  three\n```\n```python\n$ no\n```\n"
    assert shown(page) == [("one", ["x 1.5 s", "y"]), ("two; \\\n  three", [])]
    assert comparable(["y", "x 1.5 s"]) == comparable(["x  12 s", "y"]) != comparable(["x 12 m", "y"])
    assert comparable([f"is {'a' * 64}"]) == ["is sha256"]


def test_what_a_lesson_needs_follows_from_its_commands(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text("```console\n$ torchrun a.py\n$ scripts/with-etcd a; \\\n  mpirun b\n```\nscripts/with-slurm c\n")
    etcd, openmpi = needs(tmp_path)
    assert etcd is require_etcd
    assert isinstance(openmpi, partial)
    assert openmpi.args[0] == "openmpi"
