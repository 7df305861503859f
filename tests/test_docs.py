"""The documentation: its tables are those of the code, its links lead somewhere, its snippets print what they say."""

import contextlib
import io
import json
import re
import subprocess
import sys
from collections import Counter
from datetime import date, timedelta
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from click.testing import CliRunner
from torch.distributed.run import get_args_parser

from lockstep.cli import main

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("tutorial/**/*.md")])
# Those of the tutorial are compared by test_tutorial.py, by their commands.
CHINESE = sorted([*ROOT.glob("*.zh.md"), *ROOT.glob("docs/*.zh.md")])

_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]*`")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
# A snippet to run, and what it prints in the block that follows it.
_SNIPPET = re.compile(r"^```python run\n(.*?)^```\n+```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_MARK = "```python run"
_BLOCKS = re.MULTILINE | re.DOTALL
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


def anchors(page: Path) -> list[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    words = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in _HEADING.findall(text))
    return [each.strip().replace(" ", "-") for each in words]


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


def in_any_language(page: Path) -> str:
    """Return a page's text in which a link names the English page, and a heading there by its number."""

    def link(found: re.Match[str]) -> str:
        name, mark, anchor = found[1].partition("#")
        target = page.parent / name if name else page
        place = anchors(target).index(anchor) if anchor and target.suffix == ".md" else anchor
        return found[0].replace(found[1], f"{name.replace('.zh.md', '.md')}{mark}{place}")

    return _LINK.sub(link, page.read_text(encoding="utf-8"))


def facts(text: str) -> dict[str, object]:
    """Return what a page says in any language: headings, code, links, numbers, cells of tables."""
    prose = _FENCE.sub("", text)
    return {
        "headings": re.findall(r"^#+", prose, re.MULTILINE),
        "blocks": _FENCE.findall(text),
        "code": Counter(_CODE.findall(prose)),
        "links": set(_LINK.findall(prose)),
        "numbers": Counter(_NUMBER.findall(_CODE.sub("", prose))),
        "cells": [line.count("|") for line in prose.splitlines() if line.startswith("|")],
    }


@pytest.mark.parametrize("chinese", CHINESE, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_says_the_same_in_both_languages(chinese: Path) -> None:
    english = chinese.with_name(chinese.name.replace(".zh.md", ".md"))
    assert f"({chinese.name})" in english.read_text(encoding="utf-8")
    assert f"({english.name})" in chinese.read_text(encoding="utf-8")
    assert facts(in_any_language(english)) == facts(in_any_language(chinese))


def test_facts_are_told_apart() -> None:
    page = "# e\n`a` is 1.5 of [b](b.md#c)\n```\nd 2\n```\n| x | 1,797 |\n"
    assert facts(page) == facts("# 戊\n在 [乙](b.md#c) 中 `a` 是 1.5\n```\nd 2\n```\n| 丙 | 1,797 |\n")
    for one, other in (
        ("`a`", "`b`"),
        ("1.5", "1.6"),
        ("#c", "#d"),
        ("d 2", "d 3"),
        ("1,797", "1,798"),
        ("x |", ""),
        ("# e", "## e"),
    ):
        assert facts(page) != facts(page.replace(one, other))


def test_links_between_chinese_pages_are_those_between_the_english_ones(tmp_path: Path) -> None:
    for name, heading in (("a.md", "# One"), ("a.zh.md", "# 一")):
        (tmp_path / name).write_text(f"{heading}\n", encoding="utf-8")
    for name, link in (("b.md", "a.md#one"), ("b.zh.md", "a.zh.md#一")):
        (tmp_path / name).write_text(f"[b]({link}) [c](https://d.org/e#f)\n", encoding="utf-8")
    english, chinese = (in_any_language(tmp_path / name) for name in ("b.md", "b.zh.md"))
    assert english == chinese == "[b](a.md#0) [c](https://d.org/e#f)\n"


def english_only(page: Path) -> set[str]:
    """Return the English pages that a Chinese page links to without their Chinese ones, though there are some."""
    links = {link.partition("#")[0] for link in _LINK.findall(page.read_text(encoding="utf-8"))}
    chinese = {link: link.removesuffix(".md") + ".zh.md" for link in links}
    return {
        link for link, other in chinese.items() if other not in {*links, page.name} and (page.parent / other).exists()
    }


@pytest.mark.parametrize(
    "page", [each for each in PAGES if each.name.endswith(".zh.md")], ids=lambda page: str(page.relative_to(ROOT))
)
def test_a_chinese_page_links_to_chinese_pages(page: Path) -> None:
    assert not english_only(page)


def test_links_to_the_wrong_language_are_found(tmp_path: Path) -> None:
    page = tmp_path / "a.zh.md"
    page.write_text("[b](b.md#c) [d](d.md) [d](d.zh.md) [a](a.md) [e](e.md)", encoding="utf-8")
    for name in ("b.zh.md", "d.zh.md"):
        (tmp_path / name).touch()
    assert english_only(page) == {"b.md"}


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


def test_the_flags_of_torchrun_have_their_defaults() -> None:
    page = (ROOT / "docs" / "launchers.md").read_text(encoding="utf-8")
    rows = page.partition("\n| flag of torchrun |")[2].partition("\n\n")[0].splitlines()
    flags = {flag: row.split(" | ")[1] for row in rows for flag in re.findall(r"`(--[\w-]+)`", row.split(" | ")[0])}
    options = {option: action for action in get_args_parser()._actions for option in action.option_strings}
    named = {option.replace("_", "-"): action for option, action in options.items() if option.startswith("--")}
    for name, action in named.items():
        assert name == "--help" or str(action.default or "") in flags[name]  # none where torch has None, False or 0
    documented = re.search(r"These are the flags of torch (\d+)\.(\d+)\.", page)
    assert documented is not None
    if tuple(map(int, torch.__version__.split(".")[:2])) >= tuple(map(int, documented.groups())):
        assert flags.keys() <= options.keys()  # an older torch has fewer


def test_the_recipes_named_beside_tutorials_are_taken_by_so_many_ranks() -> None:
    page = (ROOT / "docs" / "tutorials.md").read_text(encoding="utf-8")
    commands = re.findall(r"`(?:srun -n(\d+) )?lockstep train ([^`]*)`", page)
    assert len(commands) == 2
    for ranks, words in commands:
        launch = ["launch", "--dry-run", "--on", "slurm", "--nodes", "1", "--processes-per-node", ranks or "1", "--"]
        done = CliRunner().invoke(main, [*launch, "train", *words.split()])
        assert done.exit_code == 0, (words, done.output)


@pytest.mark.parametrize("name", ["benchmark-table", "configuration-table", "prove-versions", "zoo-table"])
def test_tables_are_those_of_the_code_and_the_results(name: str) -> None:
    script = ROOT / "scripts" / name
    checked = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


CITED = [
    line.split(" | ") for line in (ROOT / "tests/cited.txt").read_text("utf-8").splitlines() if line.startswith("docs/")
]


@pytest.mark.parametrize(("page", "text", "file", "result", "row", "figure"), CITED)
def test_figures_in_prose_are_those_of_the_results(
    page: str, text: str, file: str, result: str, row: str, figure: str
) -> None:
    prose = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    results = json.loads((ROOT / f"benchmarks/results/{file}.json").read_text(encoding="utf-8"))["results"]
    [found] = [each for each in results if result in each["name"]]
    [measured] = [each[figure] for each in found["rows"] if each["name"].startswith(row)]
    assert text.format(measured) in prose


def test_the_planted_flips_are_counted() -> None:
    totals = json.loads((ROOT / "benchmarks/results/corruption.json").read_text(encoding="utf-8"))["totals"].values()
    planted, effect, found, named, nobody, errors = (
        sum(row.get(name, 0) for row in totals)
        for name in ("planted", "effect", "found", "named", "nobody named", "error")
    )
    assert effect == found
    page = " ".join((ROOT / "docs/failures.md").read_text(encoding="utf-8").split())
    assert f"{planted:,} flips" in page
    assert (
        f"{effect} had an effect. All of them were found; the rank was named for {named}, no rank for {nobody}," in page
    )
    assert f"{errors} of the {planted:,} ended the run with an error" in page


def test_the_gates_that_trainers_pass_are_those_of_the_results() -> None:
    proof = json.loads((ROOT / "benchmarks/results/gates.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs/keep-your-trainer.md").read_text(encoding="utf-8").partition("### Which gates other")[2]
    header, _, *rows = [line.strip("| ").split("|") for line in page.splitlines() if line.startswith("|")]
    gates = [each.strip() for each in header[1:]]
    shown = [[cell.partition(":")[0].strip() for cell in row[1:]] for row in rows]
    asked = [*proof["trainers"].values(), proof["control"]]
    assert shown == [[row.get(gate, {"verdict": ""})["verdict"] for gate in gates] for row in asked]
    assert {row["order, batch per process"]["verdict"] for row in proof["trainers"].values()} == {"falls"}
    assert all(gate == fell for gate, fell in proof["faults"].items())
    for said in (
        proof["date"],
        proof["commit"][:8],
        proof["machine"],
        proof["python"],
        *map(" ".join, proof["packages"].items()),
    ):
        assert said in page, said


def test_the_runs_that_prove_the_bits_are_counted_with_their_date_and_commit() -> None:
    proof = json.loads((ROOT / "benchmarks/results/bits.json").read_text(encoding="utf-8"))
    runs = sum(len(row["placements"]) for row in proof["rows"])
    assert not any(row["departs"] for row in proof["rows"])
    factors = [{each for row in proof["rows"] for each in row["recipe"][number : number + 1]} for number in range(3)]
    counts = [str(len(each)) for each in (*factors, {name for row in proof["rows"] for name in row["placements"]})]
    for name in ("README.md", "README.zh.md"):
        page = (ROOT / name).read_text(encoding="utf-8")
        assert f"{runs:,}" in page[: page.index("(benchmarks/results/bits.json)")].rpartition("[")[2]
        sentence = page.partition("(benchmarks/results/bits.json)")[2][:300]
        for said in (str(len(proof["rows"])), proof["date"], proof["commit"], *counts):
            assert re.search(rf"(?<!\w){said}(?!\w)", sentence), said


def test_the_figures_of_the_readme_are_at_most_30_days_older_than_the_commit() -> None:
    """So that old figures are measured again. The age counts from the commit, so that a checkout passes on any day."""
    log = subprocess.run(["git", "log", "-1", "--format=%cs"], cwd=ROOT, capture_output=True, text=True, check=True)
    committed = date.fromisoformat(log.stdout.strip())
    for name in ("README.md", "README.zh.md"):
        figures = (
            (ROOT / name).read_text(encoding="utf-8").partition("<!-- benchmarks -->")[2].partition("<!-- end -->")[0]
        )
        measured = [date.fromisoformat(each) for each in re.findall(r"\d{4}-\d\d-\d\d", figures)]
        assert measured, name
        assert committed - min(measured) <= timedelta(days=30), name


def test_the_picture_of_the_readme_shows_the_hash_of_the_first_steps() -> None:
    """`scripts/record` draws the picture; both runs of it train as the page does."""
    picture = (ROOT / "docs/images/proof.svg").read_text(encoding="utf-8").replace("&#160;", " ")
    page = (ROOT / "docs/first-steps.md").read_text(encoding="utf-8")
    [printed] = re.findall(r"^weights sha256 (\w{64})$", page, re.MULTILINE)
    assert re.findall(r"weights sha256 (\w{64})", picture) == [printed, printed]


def test_a_refused_configuration_is_told_as_its_page_says(here: Path) -> None:
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8").partition("\n## Errors\n")[2]
    recipe, command, told = re.findall(
        r"^```yaml\n(.*?)^```\n+```console\n\$ lockstep (.*?)\n(.*?)^```$", page, _BLOCKS
    )[0]
    (here / "bad.yaml").write_text(recipe)
    assert CliRunner().invoke(main, command.split()).stderr == told


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
