"""A page of tables and charts in one HTML file, which needs no network and makes no request.

Its policy (Content-Security-Policy) forbids all that would be loaded, and every script but its own two, by their
hashes: text of runs is escaped, and where that failed it still could not run. A page that is live has no sections at
first: it asks the server that it came from for them, again and again, and for nothing else.
"""

from __future__ import annotations

import hashlib
import json
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path
from typing import Any, Final

from lockstep.common.text import printable
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
    """Tiles in a row, with a heading."""

    title: str
    tiles: Sequence[Tile]
    note: str = ""


@dataclass(frozen=True)
class Passage:
    """A text that stands for itself, line by line; what was `given` is distinguished from what `follows`."""

    name: str
    given: str
    follows: str


@dataclass(frozen=True)
class Passages:
    """Passages below each other, with a heading."""

    title: str
    passages: Sequence[Passage]
    note: str = ""


@dataclass(frozen=True)
class ProgressBar:
    """How far something is, `done` of `total`, with lines of words."""

    title: str
    done: int
    total: int
    lines: Sequence[str]


Section = Table | Chart | Words | Tiles | Passages | ProgressBar


def page(title: str, sections: Sequence[Section]) -> str:
    """Return the page as HTML."""
    body = "\n".join(_section(number, each) for number, each in enumerate(sections))
    switch = _SWITCH if any(isinstance(each, Chart) and each.axes for each in sections) else ""
    return _document(title, switch + body, _part("page.js") + _part("page_still.js"))


def live_page(title: str, every_ms: int) -> str:
    """Return a page as HTML whose sections are those of `live_parts`, which it gets from `data` in the same folder."""
    below = f'<p class=note id="note" role="status"></p>\n{_SWITCH}<div id="sections" data-every="{every_ms}"></div>'
    no_icon = '<link rel="icon" href="data:,">\n'  # which a browser asks a server for
    return _document(title, below, _part("page.js") + _part("page_live.js"), "; connect-src 'self'", no_icon)


def live_parts(sections: Sequence[Section]) -> list[dict[str, Any]]:
    """Return the sections for a live page, ready for JSON: each with a key that it keeps, HTML, and plotly's figure."""
    return [
        {"key": f"{type(each).__name__} {each.title}", "html": _inner(number, each), "figure": _figure(each)}
        for number, each in enumerate(sections)
    ]


def _document(title: str, body: str, script: str, policy: str = "", icon: str = "") -> str:
    from plotly.offline import get_plotlyjs

    plotly = get_plotlyjs().replace("</script", "<\\/script")  # which would end it
    allowed = " ".join(map(_hash, (plotly, script)))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY.format(scripts=allowed)}{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
{icon}<title>{_escape(title)}</title>
<style>{_part("page.css")}</style>
</head>
<body>
<main>
<h1>{_escape(title)}</h1>
{body}
</main>
<script>{plotly}</script>
<script>{script}</script>
</body>
</html>
"""


@cache
def _part(name: str) -> str:
    """Return the text of a file in this folder."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    """Return what names a script in the policy."""
    return f"'sha256-{b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _section(number: int, section: Section) -> str:
    figure = _figure(section)
    # Within a script no text ends it but </, and JSON may write < otherwise.
    text = json.dumps(figure, allow_nan=False).replace("<", "\\u003c")
    data = f'\n<script type="application/json" data-for="chart-{number}">{text}</script>' if figure else ""
    return f"<section>\n{_inner(number, section)}{data}\n</section>"


def _inner(number: int, section: Section) -> str:
    heading = f"<h2>{_escape(section.title)}</h2>\n" if section.title else ""
    match section:
        case Words():
            inner = "\n".join(f"<p>{_escape(each)}</p>" for each in section.paragraphs)
        case Table():
            inner = _table(section) + _note(section.note)
        case Tiles():
            inner = f'<div class="tiles">{"".join(map(_tile, section.tiles))}</div>' + _note(section.note)
        case Passages():
            inner = "\n".join(map(_passage, section.passages)) + _note(section.note)
        case ProgressBar():
            bar = f'<progress max="{section.total}" value="{section.done}"></progress>'
            inner = "\n".join([bar, *(f"<p>{_escape(each)}</p>" for each in section.lines)])
        case Chart():
            label = _escape(section.title)
            inner = f'<div class="chart" id="chart-{number}" role="img" aria-label="{label}"></div>'
            inner += _note(section.note)
    return heading + inner


def _figure(section: Section) -> dict[str, Any] | None:
    return {**section.figure, "axes": section.axes} if isinstance(section, Chart) else None


def _table(table: Table) -> str:
    head = "".join(f"<th scope=col>{_escape(each)}</th>" for each in table.columns)
    rows = "\n".join(
        f"<tr><th scope=row>{_escape(row[0])}</th>{''.join(f'<td>{_escape(each)}</td>' for each in row[1:])}</tr>"
        for row in table.rows
    )
    return f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table></div>'


def _tile(tile: Tile) -> str:
    if not tile.source.startswith("data:"):  # all else would be loaded
        raise ValueError(f"a tile of {tile.source[:40]}")
    name, below = _escape(tile.lines[0]), "<br>".join(map(_escape, tile.lines))
    return f'<figure><img src="{_escape(tile.source)}" alt="{name}"><figcaption>{below}</figcaption></figure>'


def _passage(passage: Passage) -> str:
    text = f"<span>{_escape(passage.given)}</span>{_escape(passage.follows)}"
    # HTML drops a line end that is the first of a <pre>.
    return f"<p class=note>{_escape(passage.name)}</p>\n<pre>\n{text}</pre>"


def _note(text: str) -> str:
    return f"\n<p class=note>{_escape(text)}</p>" if text else ""


def _escape(text: str) -> str:
    return escape(printable(text))


_POLICY: Final = "default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data: blob:"
_SWITCH: Final = """<fieldset id="axis">
<legend>Curves over</legend>
<label><input type="radio" name="axis" value="samples" checked> samples</label>
<label><input type="radio" name="axis" value="seconds"> time</label>
</fieldset>
"""
