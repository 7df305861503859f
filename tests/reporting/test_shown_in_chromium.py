"""A page as a real Chromium shows it: numbers read back, clicks, both color schemes, a phone, and no request."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browse, Tab, chromium
from component import require_chromium
from PIL import Image

from lockstep.reporting.charts import (
    make_bar_chart,
    make_curve_chart,
    make_line_chart,
    make_matrix_chart,
    make_scatter_chart,
)
from lockstep.reporting.page import Paragraphs, Passage, Passages, Table, Tile, Tiles, render_page
from lockstep.reporting.thinning import Point

pytestmark = pytest.mark.slow("other programs, or minutes")

EVIL = (
    '</script><script>document.title = "evil"</script><img src="http://127.0.0.1:9/x.png" onerror="document.title=1">'
)
LONG = "runs/" + "a-very-long-name-of-a-run-" * 5
# Of one pixel, a PNG.
PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg=="
)
COUNTS = [[900 if row == column else row if row == column + 1 else 0 for column in range(10)] for row in range(10)]
POINTS = [Point(1, 64, 0.5, 2.0), Point(2, 128, 2.5, 1.0), Point(3, 192, 3.0, 0.5)]


@pytest.fixture(scope="module")
def browse() -> Iterator[Browse]:
    require_chromium()
    with chromium() as browse:
        yield browse


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a page with text that is not to be trusted everywhere, and names that are too long for a phone."""
    sections = [
        Paragraphs("", [EVIL, LONG]),
        Table("Runs", ["run", *("a column" for _ in range(12))], [[EVIL, *("12,345" for _ in range(12))]], LONG),
        make_curve_chart("loss/train", {EVIL: POINTS, LONG: POINTS[:2]}, "loss", noisy=True),
        make_line_chart("Time", "processes", "seconds", {"ddp": [(1, 8.0), (2, 4.0)]}),
        make_bar_chart("Seconds", "seconds", {"data": [1.0, 2.0]}, ["ddp on 2", LONG]),
        make_matrix_chart("Counts", "predicted", "true", [EVIL, LONG, *map(str, range(8))], COUNTS),
        make_scatter_chart("Predicted", "true", "predicted", [(1.0, 2.0), (3.0, 2.5)]),
        Tiles("Mistakes", [Tile(PIXEL, [EVIL, LONG])] * 24, LONG),
        Passages("Text", [Passage(EVIL, f"  {EVIL}\n", LONG)], LONG),
        Table("What differs", ["run", *["recipe.optimizer.weight_decay"] * 9], [["a" * 20, *["0.0005"] * 9]]),
        make_curve_chart("top1", {LONG: POINTS}, "top1", training={EVIL: POINTS}, names=[EVIL, LONG], from_zero=True),
    ]
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(render_page("Two runs", sections), encoding="utf-8")
    return path


def visit(
    browse: Browse, file: Path, *steps: str, width: int = 1000, scheme: str = "light", picture: Path | None = None
) -> list[object]:
    """Return what expressions are in the page, one after the other; `click X` clicks on the element X instead."""
    found: list[object] = []

    async def visit(tab: Tab) -> None:
        await tab.width(width)
        await tab.until("document.querySelectorAll('.chart .main-svg').length >= 3")
        await tab.colors(scheme)
        await tab.until("[...document.querySelectorAll('.chart')].every(e => e._fullLayout.width <= innerWidth)")
        for step in steps:
            if step.startswith("click "):
                await tab.click(step.removeprefix("click "))
            else:
                found.append(await tab.value(step))
        if picture is not None:
            await tab.screenshot(picture)
        assert [each for each in tab.requests if not each.startswith("data:")] == [file.as_uri()]
        assert tab.problems == []

    browse(file, visit)
    return found


def test_charts_have_the_numbers_and_the_switch_moves_the_curves(browse: Browse, file: Path) -> None:
    x = "document.getElementById('chart-2').data.map(trace => trace.x)"
    axis = "document.querySelector('#chart-2 .xtitle').textContent"
    lines_drawn = "document.querySelectorAll('#chart-2 .scatterlayer .trace').length"
    others = "document.getElementById('chart-3').data[0].x"
    found = visit(
        browse,
        file,
        *(x, axis, lines_drawn, others, "click input[value=seconds]"),
        *(x, axis, others, "click input[value=samples]", x),
    )
    over_samples, over_seconds = [[64, 128, 192], [64, 128]], [[0.5, 2.5, 3], [0.5, 2.5]]
    assert found == [over_samples, "samples", 2, [1, 2], over_seconds, "seconds", [1, 2], over_samples]


def test_curves_are_smoothed_and_drawn_on_a_logarithmic_axis(browse: Browse, file: Path) -> None:
    """The weighted means are those of TensorBoard: 2; (0.25 + 0.5 x 1) / 0.75 ...; what they are of stays, faint."""
    y, kind = "document.getElementById('chart-2').data.map(trace => trace.y)", "_fullLayout.yaxis.type"
    kinds = [f"document.getElementById('chart-{number}').{kind}" for number in (2, 3)]
    smooth = (
        "((e) => { e.value = 0.5; e.dispatchEvent(new Event('input', {bubbles: true})); })"
        "(document.getElementById('smoothing'))"
    )
    found = visit(browse, file, y, *kinds, smooth, y, "click #logarithmic", *kinds)
    assert found[:3] == [[[2, 1, 0.5], [2, 1]], "linear", "linear"]
    smoothed, faint = found[4][:2], found[4][2:]  # type: ignore[index]
    assert smoothed == [pytest.approx([2, 4 / 3, 0.75 / 0.875]), pytest.approx([2, 4 / 3])]
    assert faint == [[2, 1, 0.5], [2, 1]]
    assert found[5:] == ["log", "linear"]


@pytest.mark.parametrize(("width", "columns"), [(900, 1), (1300, 2)])
def test_charts_stand_in_two_columns_where_there_is_room(browse: Browse, file: Path, width: int, columns: int) -> None:
    lefts = "[...new Set([...document.querySelectorAll('.chart')].map(e => e.getBoundingClientRect().left))].length"
    assert visit(browse, file, lefts, width=width) == [columns]


def test_lines_are_brighter_on_a_dark_ground(browse: Browse, file: Path) -> None:
    line = "getComputedStyle(document.querySelector('#chart-2 .js-line')).stroke"
    grounds = "getComputedStyle(document.body).backgroundColor"
    for scheme in ("light", "dark"):
        ground, stroke = (luminance(str(each)) for each in visit(browse, file, grounds, line, scheme=scheme))
        assert contrast(ground, stroke) >= 4.5, scheme


def test_a_tick_box_of_the_page_takes_a_run_out_of_all_charts(browse: Browse, file: Path) -> None:
    charts = "[2, 10].map(number => document.getElementById(`chart-${number}`))"
    shown = f"{charts}.map(chart => chart.data.map(trace => trace.visible))"
    legends = f"{charts}.map(chart => chart.querySelectorAll('.legendtext').length)"
    box, none, every = ("#legend input", "#legend button:last-of-type", "#legend button")
    open_, count = (
        "document.querySelector('#legend details').open = true",
        "document.querySelector('summary').textContent",
    )
    before, own, _, *found = visit(
        browse,
        file,
        *(shown, legends, open_, count, f"click {box}", shown, count),
        *(f"click {none}", shown, count, f"click {every}", shown, count),
    )
    everything = [[True, True], [True, True]]
    assert (before, own) == (everything, [0, 0])
    assert found == [
        "2 runs",
        *([[False, True], [False, True]], "1 of 2 runs"),
        *([[False, False], [False, False]], "0 of 2 runs"),
        *(everything, "2 runs"),
    ]


def test_training_or_validation_is_taken_out_of_all_charts(browse: Browse, file: Path) -> None:
    shown = "document.getElementById('chart-10').data.map(trace => [trace.meta.part, trace.visible])"
    names = "[...document.querySelectorAll('#parts label')].map(label => label.textContent)"
    assert visit(browse, file, names, "click #parts input", shown) == [
        ["training", "validation"],
        [["training", False], ["validation", True]],
    ]


def test_an_axis_from_zero_can_be_drawn_close(browse: Browse, file: Path) -> None:
    lowest = "document.getElementById('chart-10')._fullLayout.yaxis.range[0]"
    zero, close = visit(browse, file, lowest, "click #zero", lowest)
    assert (zero, close != 0) == (0, True)


def test_a_color_in_the_legend_is_that_of_the_curves(browse: Browse, file: Path) -> None:
    legend = "[...document.querySelectorAll('#legend line')].map(line => getComputedStyle(line).stroke)"
    curve = "[...document.querySelectorAll('#chart-2 .js-line')].map(line => getComputedStyle(line).stroke)"
    for scheme in ("light", "dark"):
        one, other = visit(browse, file, legend, curve, scheme=scheme)
        assert one == other
        assert len(set(one)) == 2  # type: ignore[call-overload]


def test_a_wide_table_keeps_its_names_and_has_a_shadow(browse: Browse, file: Path) -> None:
    table = "document.querySelector('.wide')"
    scrolled = f"({table}.scrollLeft = 300, {table}.scrollLeft)"
    left = f"{table}.querySelector('tbody th').getBoundingClientRect().left - {table}.getBoundingClientRect().left"
    width = f"{table}.querySelector('tbody th').getBoundingClientRect().width / innerWidth"
    shadow = f"getComputedStyle({table}).backgroundImage"
    found = visit(browse, file, scrolled, left, width, shadow, width=420)
    assert found[:2] == [300, 0]
    assert isinstance(found[2], float)
    assert found[2] < 0.5
    assert str(found[3]).count("linear-gradient") == 2


def test_a_matrix_shows_each_count_that_is_there(browse: Browse, file: Path) -> None:
    drawn, names, inks = visit(
        browse,
        file,
        "[...document.querySelectorAll('#chart-5 .heatmap-label')].map(e => e.textContent).filter(Boolean)",
        "[...document.querySelectorAll('#chart-5 .xtick text')].map(e => e.textContent)",
        "[...new Set([...document.querySelectorAll('#chart-5 .heatmap-label')].map(e => getComputedStyle(e).fill))]",
    )
    assert sorted(drawn) == sorted(str(count) for row in COUNTS for count in row if count)
    assert names[:3] == [EVIL[:15] + "…", LONG[:15] + "…", "0"]
    for trace in make_matrix_chart("", "", "", ["a"], [[1]]).figure["data"]:
        for _, shade in trace["colorscale"]:
            red, green, blue = (int(shade[at : at + 2], 16) for at in (1, 3, 5))
            assert all(contrast(luminance(f"rgb({red}, {green}, {blue})"), luminance(each)) >= 4.5 for each in inks)


def test_tiles_are_shown_and_passages_keep_their_lines(browse: Browse, file: Path) -> None:
    loaded, names, text, given = visit(
        browse,
        file,
        "[...document.querySelectorAll('.tiles img')].map(e => e.complete && e.naturalWidth)",
        "[...new Set([...document.querySelectorAll('.tiles img')].map(e => e.alt))]",
        "document.querySelector('pre').textContent",
        "document.querySelector('pre span').textContent",
    )
    assert loaded == [1] * 24
    assert names == [EVIL]
    assert text == f"  {EVIL}\n{LONG}"
    assert given == f"  {EVIL}\n"


def test_what_runs_are_called_is_text(browse: Browse, file: Path) -> None:
    title, cell, name = visit(
        browse,
        file,
        "document.title",
        "document.querySelector('tbody th').textContent",
        "document.querySelector('#legend label').textContent",
    )
    assert (title, cell, name) == ("Two runs", EVIL, EVIL)


@pytest.mark.parametrize("width", [390, 1000])
def test_a_page_is_no_wider_than_the_window(browse: Browse, file: Path, width: int) -> None:
    inner, whole, charts = visit(
        browse,
        file,
        "innerWidth",
        "document.documentElement.scrollWidth",
        "[...document.querySelectorAll('.chart')].map(e => e.getBoundingClientRect().right)",
        width=width,
    )
    assert inner == width
    assert isinstance(whole, int)
    assert width - 20 <= whole <= width  # beside it there may be a scroll bar
    assert max(charts) <= whole


def test_names_of_keys_break_at_their_dots_and_words_where_there_is_no_room(browse: Browse, file: Path) -> None:
    table = "[...document.querySelectorAll('.wide')].at(-1)"
    lines = (
        f"(range => (range.selectNodeContents({table}.querySelector('tbody th span')), range.getClientRects().length))"
    )
    assert visit(browse, file, f"{table}.scrollWidth <= {table}.clientWidth", f"{lines}(new Range())", width=1500) == [
        True,
        1,
    ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_ground(browse: Browse, file: Path, tmp_path: Path, scheme: str) -> None:
    picture = tmp_path / "page.png"
    colors = visit(
        browse,
        file,
        "getComputedStyle(document.body).backgroundColor",
        "getComputedStyle(document.querySelector('td')).color",
        "getComputedStyle(document.querySelector('.note')).color",
        "getComputedStyle(document.querySelector('#chart-6 .legendtext')).fill",
        "getComputedStyle(document.querySelector('#legend label')).color",
        "getComputedStyle(document.querySelector('#chart-5 .ytick text')).fill",
        "getComputedStyle(document.querySelector('figcaption')).color",
        "getComputedStyle(document.querySelector('pre')).color",
        "getComputedStyle(document.querySelector('pre span')).color",
        scheme=scheme,
        picture=picture,
    )
    ground, *text = (luminance(str(each)) for each in colors)
    assert (ground > 0.5) == (scheme == "light")
    assert all(contrast(ground, each) >= 4.5 for each in text)  # WCAG 2.2, 1.4.3
    with Image.open(picture) as shown:
        assert shown.height > 1000
        assert len(shown.convert("RGB").getcolors(1 << 24) or []) > 50  # it is not blank


def contrast(one: float, other: float) -> float:
    """Return the contrast of two luminances, as WCAG 2.2 defines it: 1 to 21."""
    return (max(one, other) + 0.05) / (min(one, other) + 0.05)


def luminance(color: str) -> float:
    """Return the relative luminance of a color `rgb(r, g, b)`, as WCAG 2.2 defines it."""
    parts = [int(each) / 255 for each in re.findall(r"\d+", color)[:3]]
    red, green, blue = (each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
