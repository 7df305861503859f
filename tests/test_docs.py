"""The documentation: its tables are those of the code, its links lead somewhere, its snippets print what they say."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("tutorial/**/*.md")])

_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]*`")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
# A snippet to run, and what it prints in the block that follows it.
_SNIPPET = re.compile(r"^```python run\n(.*?)^```\n+```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_MARK = "```python run"
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")


class Snippet(NamedTuple):
    """A piece of Python in a page, and what the page says that it prints."""

    place: str
    code: str
    printed: str


def snippets(page: Path) -> list[Snippet]:
    text = page.read_text(encoding="utf-8")
    return [
        Snippet(f"{page.relative_to(ROOT)}:{text.count(chr(10), 0, found.start()) + 1}", found[1], found[2])
        for found in _SNIPPET.finditer(text)
    ]


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    words = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in _HEADING.findall(text))
    return {each.strip().replace(" ", "-") for each in words}


def broken(page: Path) -> list[str]:
    """Return the relative links of a page that lead nowhere."""
    text = _CODE.sub("", _FENCE.sub("", page.read_text(encoding="utf-8")))
    found = []
    for link in _LINK.findall(text):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        lost = not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target))
        if lost and "://" not in link:
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert not broken(page)


def test_broken_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One two\n[a](gone.md) [b](#one-two) [c](#three) [d](https://example.org/x) `[e](code.md)`\n")
    assert broken(page) == ["gone.md", "#three"]


def facts(text: str) -> dict[str, object]:
    """Return what a page says in any language: blocks of code, words of code, links, numbers, cells of tables."""
    prose = _FENCE.sub("", text)
    return {
        "blocks": _FENCE.findall(text),
        "code": Counter(_CODE.findall(prose)),
        "links": set(_LINK.findall(prose)),
        "numbers": Counter(_NUMBER.findall(_CODE.sub("", prose))),
        "cells": [line.count("|") for line in prose.splitlines() if line.startswith("|")],
    }


def test_the_readme_says_the_same_in_both_languages() -> None:
    english, chinese = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh.md"))
    assert facts(english.replace("(README.zh.md)", "(README.md)")) == facts(chinese)  # each links to the other


def test_facts_are_told_apart() -> None:
    page = "`a` is 1.5 of [b](b.md#c)\n```\nd 2\n```\n| x | 1,797 |\n"
    assert facts(page) == facts("在 [乙](b.md#c) 中 `a` 是 1.5\n```\nd 2\n```\n| 丙 | 1,797 |\n")
    for one, other in (("`a`", "`b`"), ("1.5", "1.6"), ("#c", "#d"), ("d 2", "d 3"), ("1,797", "1,798"), ("x |", "")):
        assert facts(page) != facts(page.replace(one, other))


def test_index_names_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    pages = {str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md")} - {"README.md"}
    assert pages <= set(_LINK.findall(index))


def test_the_tree_of_the_design_is_that_of_the_code() -> None:
    package = ROOT / "src" / "lockstep"
    listed = (ROOT / "docs" / "design.md").read_text(encoding="utf-8").partition("\ntests/ ")[0]
    room, rooms, missing = "", set(), []
    for nested, name in re.findall(r"^(│   )?[├└]── (\S+)", listed, re.MULTILINE):
        room = room if nested else name  # a nested line belongs to the last one that is not
        path = package / room / name if nested else package / name
        rooms |= {room.rstrip("/")} if path.is_dir() else set()
        missing += [] if path.exists() else [name]
    assert not missing
    assert rooms == {each.name for each in package.iterdir() if each.is_dir() and each.name != "__pycache__"}


@pytest.mark.parametrize("name", ["benchmark-table", "configuration-table"])
def test_tables_are_those_of_the_code_and_the_results(name: str) -> None:
    script = ROOT / "scripts" / name
    checked = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize(
    "snippet", [each for page in PAGES for each in snippets(page)], ids=lambda snippet: snippet.place
)
def test_snippets_print_what_they_say(snippet: Snippet) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(snippet.code, snippet.place, "exec"), {"__name__": "__main__"})
    assert printed.getvalue() == snippet.printed


def test_every_marked_snippet_says_what_it_prints() -> None:
    marked = sum(page.read_text(encoding="utf-8").count(_MARK) for page in PAGES)
    assert marked == sum(len(snippets(page)) for page in PAGES) > 0
