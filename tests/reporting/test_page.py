"""A page is whole in itself: it loads nothing, runs no script but its own, and shows what runs are called as text."""

import re
from html.parser import HTMLParser

import pytest

from lockstep.reporting import page as pages
from lockstep.reporting.charts import curves
from lockstep.reporting.page import Passage, Passages, Section, Table, Tile, Tiles, Words, page
from lockstep.reporting.thinning import Point

EVIL = '</script><script>alert(1)</script><img src="http://example.org/x.png" onerror=alert(2)>\x1b[2J'
SECTIONS: list[Section] = [
    Words(EVIL, [EVIL]),
    Table(EVIL, ["run", EVIL], [[EVIL, EVIL]], note=EVIL),
    curves(EVIL, {EVIL: [Point(1, 64, 1.0, 2.0)]}, EVIL),
    Passages(EVIL, [Passage(EVIL, EVIL, EVIL)], EVIL),
    Tiles(EVIL, [Tile('data:image/png;base64,iVBORw0KGgo=" onerror="alert(3)', [EVIL, EVIL])], EVIL),
]


class Tags(HTMLParser):
    """What a browser would make of a page: its tags, and what they would load."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.handlers: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [f"{tag} {name}={value}" for name, value in attrs if name in ("src", "href", "srcset", "data")]
        self.handlers += [name for name, _ in attrs if name.startswith("on")]


@pytest.fixture(scope="module")
def html() -> str:
    return page(EVIL, SECTIONS)


def test_nothing_is_loaded_and_nothing_of_a_run_is_a_tag(html: str) -> None:
    found = Tags()
    found.feed(html)
    assert found.handlers == []
    assert found.loads == ['img src=data:image/png;base64,iVBORw0KGgo=" onerror="alert(3)']  # which is in the page
    assert found.tags.count("img") == 1
    assert not {"link", "iframe", "object", "base", "a"} & set(found.tags)
    assert found.tags.count("script") == 3  # the data of a chart, plotly, and what draws
    assert "@import" not in pages._part("page.css")
    assert "url(" not in pages._part("page.css")
    assert r"\x1b[2J" in html
    assert "\x1b" not in html


def test_the_policy_allows_its_own_two_scripts_alone(html: str) -> None:
    [policy] = re.findall(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', html)
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert len(re.findall(r"'sha256-[A-Za-z0-9+/]{43}='", policy)) == 2
    assert "unsafe-inline" not in policy.partition("style-src")[0]
    assert html.index(policy) < html.index("<script")


def test_a_tile_that_would_be_loaded_is_none() -> None:
    with pytest.raises(ValueError, match=r"a tile of https://example\.org/x\.png"):
        page("t", [Tiles("t", [Tile("https://example.org/x.png", ["x"])])])


def test_a_passage_keeps_its_lines() -> None:
    made = page("t", [Passages("t", [Passage("name", "\ngiven\n", "follows\n")])])
    assert "<pre>\n<span>\ngiven\n</span>follows\n</pre>" in made  # the first line end is HTML's own


def test_the_same_runs_give_the_same_page(html: str) -> None:
    assert page(EVIL, SECTIONS) == html


def test_the_switches_are_before_what_they_switch_and_nowhere_without_curves() -> None:
    assert 'id="switches"' not in page("t", SECTIONS[:2])
    before, _, behind = page("t", SECTIONS).partition('id="switches"')
    assert (before.count("<section>"), behind.count("<section>")) == (2, len(SECTIONS) - 2)
    assert 'id="switches"' not in behind


def test_a_long_cell_may_wrap() -> None:
    made = page("t", [Table("t", ["run", "machine", "step"], [["a", "2 cores of one AMD EPYC, torch", "12,345"]])])
    assert "<td class=long>2 cores" in made
    assert "<td>12,345" in made
