"""A page of tables and charts in one HTML file, which needs no network and makes no request.

Its policy (Content-Security-Policy) forbids all that would be loaded, and every script but its own two, by their
hashes: text of runs is escaped, and where that failed it still could not run. A page that is live has no sections at
first: it asks the server that it came from for them, again and again, and for nothing else.
"""

import hashlib
import json
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, Template
from markupsafe import Markup

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

    def __post_init__(self) -> None:
        if not self.source.startswith("data:"):  # all else would be loaded
            raise ValueError(f"a tile of {self.source[:40]}")


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
    return _document(title, sections, "page_still.js", 0)


def live_page(title: str, every_ms: int) -> str:
    """Return a page as HTML whose sections are those of `live_parts`, which it gets from `data` in the same folder."""
    return _document(title, (), "page_live.js", every_ms)


def live_parts(sections: Sequence[Section]) -> list[dict[str, Any]]:
    """Return the sections for a live page, ready for JSON: each with a key that it keeps, HTML, and plotly's figure."""
    inner = _template().module.inner  # type: ignore[attr-defined]
    return [
        {"key": f"{type(each).__name__} {each.title}", "html": inner(number, each).strip(), "figure": _figure(each)}
        for number, each in enumerate(sections)
    ]


def _document(title: str, sections: Sequence[Section], script: str, every_ms: int) -> str:
    from plotly.offline import get_plotlyjs

    plotly = get_plotlyjs().replace("</script", "<\\/script")  # which would end it
    scripts = plotly, _part("page.js") + _part(script)
    digests = [b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in scripts]
    # Within a script no text ends it but </, and JSON may write < otherwise.
    figures = [json.dumps(_figure(each), allow_nan=False).replace("<", "\\u003c") for each in sections]
    return _template().render(
        title=title,
        sections=sections,
        figures=[Markup("" if text == "null" else text) for text in figures],
        first_curves=next((at for at, each in enumerate(sections) if isinstance(each, Chart) and each.axes), None),
        every_ms=every_ms,
        hashes=Markup(" ".join(f"'sha256-{digest}'" for digest in digests)),
        style=Markup(_part("page.css")),
        plotly=Markup(plotly),
        script=Markup(scripts[1]),
    )


@cache
def _template() -> Template:
    """Return page.html; what it is given it escapes, both for HTML and as it would be on a terminal."""
    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, finalize=_printable
    )
    return environment.from_string(_part("page.html"))


def _printable(value: object) -> object:
    return value if isinstance(value, Markup) else printable(str(value))


@cache
def _part(name: str) -> str:
    """Return the text of a file in this folder."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _figure(section: Section) -> dict[str, Any] | None:
    return {**section.figure, "axes": section.axes} if isinstance(section, Chart) else None
