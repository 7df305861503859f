"""A page is whole in itself: it loads nothing, runs no script but its own, and shows what runs are called as text."""

import re
from html.parser import HTMLParser

import pytest

from lockstep.reporting import page as pages
from lockstep.reporting.charts import make_curve_chart
from lockstep.reporting.page import (
    Paragraphs,
    Passage,
    Passages,
    ProgressBar,
    Section,
    Table,
    Tile,
    Tiles,
    ValueGrid,
    render_page,
)
from lockstep.reporting.thinning import Point

EVIL = '</script><script>alert(1)</script><img src="http://example.org/x.png" onerror=alert(2)>\x1b[2J'
SECTIONS: list[Section] = [
    Paragraphs(EVIL, [EVIL]),
    Table(EVIL, ["run", EVIL], [[EVIL, EVIL]], note=EVIL),
    make_curve_chart(EVIL, {EVIL: [Point(1, 64, 1.0, 2.0)]}, EVIL),
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
    return render_page(EVIL, SECTIONS)


def test_nothing_is_loaded_and_nothing_of_a_run_is_a_tag(html: str) -> None:
    found = Tags()
    found.feed(html)
    assert found.handlers == []
    assert found.loads == ['img src=data:image/png;base64,iVBORw0KGgo=" onerror="alert(3)']  # which is in the page
    assert found.tags.count("img") == 1
    assert not {"link", "iframe", "object", "base", "a"} & set(found.tags)
    assert found.tags.count("script") == 3  # the data of a chart, plotly, and what draws
    assert "@import" not in pages._read_file("page.css")
    assert "url(" not in pages._read_file("page.css")
    assert r"\x1b[2J" in html
    assert "\x1b" not in html


def test_the_policy_allows_its_own_two_scripts_alone(html: str) -> None:
    [policy] = re.findall(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', html)
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert len(re.findall(r"'sha256-[A-Za-z0-9+/]{43}='", policy)) == 2
    assert "unsafe-inline" not in policy.partition("style-src")[0]
    assert html.index(policy) < html.index("<script")


def test_a_tile_that_would_be_loaded_is_none() -> None:
    with pytest.raises(ValueError, match=r"Tile\.source: expected a data: URI, got https://example\.org/x\.png"):
        render_page("t", [Tiles("t", [Tile("https://example.org/x.png", ["x"])])])


def test_a_passage_keeps_its_lines() -> None:
    made = render_page("t", [Passages("t", [Passage("name", "\ngiven\n", "follows\n")])])
    assert "<pre>\n<span>\ngiven\n</span>follows\n</pre>" in made  # the first line end is HTML's own


def test_the_same_runs_give_the_same_page(html: str) -> None:
    assert render_page(EVIL, SECTIONS) == html


def test_the_switches_are_before_what_they_switch_and_nowhere_without_curves() -> None:
    assert 'id="switches"' not in render_page("t", SECTIONS[:2])
    before, _, behind = render_page("t", SECTIONS).partition('id="switches"')
    assert (before.count("<section>"), behind.count("<section>")) == (2, len(SECTIONS) - 2)
    assert 'id="switches"' not in behind


def test_a_column_with_a_long_cell_is_left_aligned_and_may_wrap() -> None:
    rows = [["a", "2 cores of one AMD EPYC, torch", "12,345"], ["b", "short", "6"]]
    made = render_page("t", [Table("t", ["run", "machine", "step"], rows)])
    for part in ("<th scope=col class=long>machine", "<td class=long>2 cores", "<td class=long>short", "<td>12,345"):
        assert part in made


def test_a_grouped_table_has_each_name_once_and_a_folded_one_is_closed() -> None:
    rows = [*(["runs/a", str(step)] for step in range(8)), *(["runs/b", str(step)] for step in range(3))]
    made = render_page("t", [Table("t", ["run", "after step"], rows, grouped=True, folded=True)])
    assert (made.count(">runs/<"), made.count("runs/a"), made.count("runs/b")) == (0, 1, 1)
    assert "<th scope=col>after step" in made
    assert "<details><summary>11 rows</summary>" in made
    alone = render_page("t", [Table("t", ["run", "after step"], rows[:8], grouped=True, folded=True)])
    assert "runs/a" not in alone
    assert "<details>" not in alone


def test_names_break_at_dots_but_not_within_numbers() -> None:
    made = render_page("t", [Table("t", ["recipe.lr"], [["recipe.lr=0.003"]])])
    assert "recipe.<wbr>lr=0.003" in made


def test_progress_and_figures_are_pairs_of_a_name_and_a_value() -> None:
    sections = [ProgressBar("runs/a", 3, 9, [("step", "3/9")]), ValueGrid("Run", [("state", EVIL)])]
    for part in ('<progress max="9" value="3">', "<dt>step</dt><dd>3/9</dd>", "<dt>state</dt><dd>&lt;/script"):
        assert part in render_page("t", sections)
    assert '<progress value="0.5">' in render_page("t", [Table("t", ["run"], [["a"]], done=[0.5])])
