"""The tutorial: every lesson runs by the commands on top of its scripts, and prints what its pages show."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final, NamedTuple

import pytest

ROOT: Final = Path(__file__).parent.parent
TUTORIAL: Final = ROOT / "tutorial"
LESSONS: Final = sorted(path.parent for path in TUTORIAL.glob("*/README.md"))
SCRIPTS: Final = sorted(TUTORIAL.glob("*/*.py"))
LANGUAGES: Final = ("README.md", "README.zh.md")
LONGEST_SCRIPT, LONGEST_PAGE, TIMEOUT_S = 100, 60, 120

_CONSOLE = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"^\$ ((?:.*\\\n)*.*)\n?", re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HASH = re.compile(r"\b[0-9a-f]{64}\b")
_MEASURED = re.compile(r" *\b\d+(?:\.\d+)? (ms|s|MB/s)\b")  # times are those of the machine


class Shown(NamedTuple):
    """A command on a page, and the lines that the page shows of what it prints."""

    command: str
    lines: list[str]


def shown(text: str) -> list[Shown]:
    """Return the commands in the console blocks of a page, in their order."""
    found = []
    for block in _CONSOLE.findall(text):
        _, *parts = _COMMAND.split(block)
        found += [Shown(*pair) for pair in zip(parts[::2], (each.splitlines() for each in parts[1::2]), strict=True)]
    return found


def on_top(script: Path) -> list[str]:
    """Return the commands in the comment that a script starts with."""
    comment = re.match(r"(?:#.*\n)*", script.read_text(encoding="utf-8"))
    assert comment is not None
    return _COMMAND.findall(re.sub(r"^# ", "", comment[0], flags=re.MULTILINE))


def comparable(lines: list[str]) -> list[str]:
    """Return lines in an order that does not depend on which rank printed first, without times and hashes."""
    return sorted(_MEASURED.sub(r" # \1", _HASH.sub("sha256", line)).rstrip() for line in lines)


def printed(command: str, folder: Path, tmp_path: Path) -> list[str]:
    """Run a command of a page in a folder where the tutorial is."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("PYTHONUNBUFFERED", None)  # else a line and its end are written apart, and lines of two ranks mix
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    line = ["bash", "-o", "pipefail", "-c", command]
    errors = tmp_path / "errors"
    with (
        errors.open("w") as stderr,
        subprocess.Popen(
            line, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True, start_new_session=True
        ) as process,
    ):
        try:
            output, _ = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)  # torchrun ends its workers
            raise
    assert process.returncode == 0, f"{command}\n{output}\n{errors.read_text()}"
    return output.splitlines()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "clone"
    folder.mkdir()
    (folder / "tutorial").symlink_to(TUTORIAL)
    return folder


@pytest.mark.timeout(900)
@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.name)
def test_a_lesson_prints_what_its_page_shows(lesson: Path, folder: Path, tmp_path: Path) -> None:
    hashes = set()
    for command, lines in shown((lesson / "README.md").read_text(encoding="utf-8")):
        output = printed(command, folder, tmp_path)
        assert comparable(output) == comparable(lines), command
        hashes |= set(_HASH.findall("\n".join(output)))
    assert len(hashes) <= 1  # where weights are shown, they are the same under each command


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


def test_lessons_are_numbered_one_by_one() -> None:
    folders = {path.parent for path in TUTORIAL.glob("*/*.*")}
    assert folders == set(LESSONS)
    assert [int(lesson.name[:2]) for lesson in LESSONS] == list(range(1, len(LESSONS) + 1))


def test_commands_and_their_lines_are_read_from_a_page() -> None:
    page = "a\n```console\n$ one\nx 1.5 s\ny\n$ two; \\\n  three\n```\n```python\n$ no\n```\n"
    assert shown(page) == [("one", ["x 1.5 s", "y"]), ("two; \\\n  three", [])]
    assert comparable(["y", "x 1.5 s"]) == comparable(["x  12 s", "y"]) != comparable(["x 12 m", "y"])
    assert comparable([f"is {'a' * 64}"]) == ["is sha256"]
