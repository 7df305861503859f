"""A page of tables and charts in one HTML file, which needs no network and makes no request.

Its policy (Content-Security-Policy) forbids all that would be loaded, and every script but its own two, by their
hashes: text of runs is escaped, and where that failed it still could not run.
"""

from __future__ import annotations

import hashlib
import json
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.util import find_spec
from typing import Final

from lockstep.core.text import printable
from lockstep.errors import UsageError
from lockstep.reporting.charts import Chart


@dataclass(frozen=True)
class Table:
    """A table with its heading: a row of cells for each thing, of which the first cell names it."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclass(frozen=True)
class Words:
    """Paragraphs, below a heading if there is one."""

    title: str
    paragraphs: Sequence[str]


@dataclass(frozen=True)
class Tile:
    """What a data: URI shows, and the lines below it, of which the first is its name."""

    source: str
    lines: Sequence[str]


@dataclass(frozen=True)
class Tiles:
    """Tiles beside each other, with a heading."""

    title: str
    tiles: Sequence[Tile]
    note: str = ""


@dataclass(frozen=True)
class Passage:
    """A text that stands for itself, line by line; what it was `given` is set apart from what `follows`."""

    name: str
    given: str
    follows: str


@dataclass(frozen=True)
class Passages:
    """Passages below each other, with a heading."""

    title: str
    passages: Sequence[Passage]
    note: str = ""


Section = Table | Chart | Words | Tiles | Passages


def check_plotly() -> None:
    """Raise UsageError where plotly, which draws the charts, is not installed."""
    if find_spec("plotly") is None:
        raise UsageError("a page of charts needs plotly, which is not installed; pip install 'lockstep-train[report]'")


def page(title: str, sections: Sequence[Section]) -> str:
    """Return the page as HTML."""
    from plotly.offline import get_plotlyjs

    body = "\n".join(_section(number, each) for number, each in enumerate(sections))
    plotly = get_plotlyjs().replace("</script", "<\\/script")  # which would end it
    allowed = " ".join(map(_hash, (plotly, _SCRIPT)))
    switch = _SWITCH if any(isinstance(each, Chart) and each.axes for each in sections) else ""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY.format(scripts=allowed)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{_escaped(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<main>
<h1>{_escaped(title)}</h1>
{switch}{body}
</main>
<script>{plotly}</script>
<script>{_SCRIPT}</script>
</body>
</html>
"""


def _hash(script: str) -> str:
    """Return what names a script in the policy."""
    return f"'sha256-{b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _section(number: int, section: Section) -> str:
    heading = f"<h2>{_escaped(section.title)}</h2>\n" if section.title else ""
    match section:
        case Words():
            inner = "\n".join(f"<p>{_escaped(each)}</p>" for each in section.paragraphs)
        case Table():
            inner = _table(section) + _note(section.note)
        case Tiles():
            inner = f'<div class="tiles">{"".join(map(_tile, section.tiles))}</div>' + _note(section.note)
        case Passages():
            inner = "\n".join(map(_passage, section.passages)) + _note(section.note)
        case Chart():
            # Within a script no text ends it but </, and JSON may write < otherwise.
            figure = json.dumps({**section.figure, "axes": section.axes}, allow_nan=False).replace("<", "\\u003c")
            inner = (
                f'<div class="chart" id="chart-{number}" role="img" aria-label="{_escaped(section.title)}"></div>\n'
                f'<script type="application/json" data-for="chart-{number}">{figure}</script>{_note(section.note)}'
            )
    return f"<section>\n{heading}{inner}\n</section>"


def _table(table: Table) -> str:
    head = "".join(f"<th scope=col>{_escaped(each)}</th>" for each in table.columns)
    rows = "\n".join(
        f"<tr><th scope=row>{_escaped(row[0])}</th>{''.join(f'<td>{_escaped(each)}</td>' for each in row[1:])}</tr>"
        for row in table.rows
    )
    return f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table></div>'


def _tile(tile: Tile) -> str:
    if not tile.source.startswith("data:"):  # all else would be loaded
        raise ValueError(f"a tile of {tile.source[:40]}")
    name, below = _escaped(tile.lines[0]), "<br>".join(map(_escaped, tile.lines))
    return f'<figure><img src="{_escaped(tile.source)}" alt="{name}"><figcaption>{below}</figcaption></figure>'


def _passage(passage: Passage) -> str:
    text = f"<span>{_escaped(passage.given)}</span>{_escaped(passage.follows)}"
    # HTML drops a line end that is the first of a <pre>.
    return f"<p class=note>{_escaped(passage.name)}</p>\n<pre>\n{text}</pre>"


def _note(text: str) -> str:
    return f"\n<p class=note>{_escaped(text)}</p>" if text else ""


def _escaped(text: str) -> str:
    return escape(printable(text))


_POLICY: Final = "default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data: blob:"
_SWITCH: Final = """<fieldset id="axis">
<legend>Curves over</legend>
<label><input type="radio" name="axis" value="samples" checked> samples</label>
<label><input type="radio" name="axis" value="seconds"> time</label>
</fieldset>
"""
_STYLE: Final = """
:root { color-scheme: light dark; --text: #1b1f24; --soft: #57606a; --back: #ffffff; --line: #d0d7de; }
@media (prefers-color-scheme: dark) { :root { --text: #e6edf3; --soft: #9da7b3; --back: #0d1117; --line: #3d444d; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--text); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 70rem; margin: 0 auto; padding: 1rem; }
h1, h2, p, th { overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child { text-align: left; white-space: normal; min-width: 7rem; }
thead th { color: var(--soft); font-weight: 600; vertical-align: bottom; }
.note { color: var(--soft); font-size: .875rem; }
fieldset { border: 1px solid var(--line); border-radius: 6px; display: inline-flex; gap: 1rem; }
.chart { width: 100%; overflow: hidden; }
.tiles { display: flex; flex-wrap: wrap; gap: 1rem; }
figure { margin: 0; width: 7rem; } figure img { display: block; max-width: 100%; margin-bottom: .3rem; }
figcaption { font-size: .8125rem; line-height: 1.35; overflow-wrap: anywhere; }
pre { margin: 0; padding: .6rem .8rem; border: 1px solid var(--line); border-radius: 6px; font-size: .875rem;
  white-space: pre-wrap; overflow-wrap: anywhere; }
pre span { color: var(--soft); }
"""
# plotly draws what it is told once; the colours of text and lines follow the page's, and what it shows, the switch.
_SCRIPT: Final = """
"use strict";
const read = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const theme = () => ({
  paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", "font.color": read("--text"),
  "xaxis.gridcolor": read("--line"), "yaxis.gridcolor": read("--line"),
  "xaxis.zerolinecolor": read("--line"), "yaxis.zerolinecolor": read("--line"),
});
const charts = [...document.querySelectorAll("script[data-for]")].map((element) => {
  const place = document.getElementById(element.dataset.for);
  const figure = JSON.parse(element.textContent);
  Plotly.newPlot(place, figure.data, figure.layout, {displayModeBar: false});
  Plotly.relayout(place, theme());
  new ResizeObserver(() => Plotly.Plots.resize(place)).observe(place);
  return {place, axes: figure.axes};
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  charts.forEach(({place}) => Plotly.relayout(place, theme()));
});
document.getElementById("axis")?.addEventListener("change", (event) => {
  const axis = event.target.value;
  charts.filter(({axes}) => axes.includes(axis)).forEach(({place}) => Plotly.update(
    place, {x: place.data.map((trace) => trace.meta[axis])}, {"xaxis.title.text": axis, "xaxis.autorange": true}));
});
"""
