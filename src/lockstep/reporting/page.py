"""A page of tables and charts as a single HTML file that needs no network access.

The Content-Security-Policy of the page only allows its two scripts, by their hashes, and blocks all other resources.
Text from runs is escaped. Even without escaping, the browser wouldn't run the text as a script. A live page is
initially empty. It repeatedly fetches its sections from the server that served the page, and sends no other requests.
"""

import hashlib
import json
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, Template
from markupsafe import Markup

from lockstep.common.text import printable
from lockstep.reporting.charts import Chart

_LONG_CELL_CHARS: Final = 24  # a column with a longer cell is left-aligned, and its text may wrap
_MAX_UNFOLDED_ROWS: Final = 10  # a `folded` table with more rows is initially collapsed


@dataclass(frozen=True)
class Table:
    """A table with a heading. The first cell of each row is the name of the row.

    If `grouped` is set, the first cell of each row is the name of a group instead. Consecutive rows of a group are
    shown below its name, which is hidden if there is only one group. If `folded` is set and the table has more than ten
    rows, the table is collapsed until the reader opens it. `done` contains the completed fraction of each row, which is
    shown as a progress bar.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    grouped: bool = False
    folded: bool = False
    done: Sequence[float] = ()

    @property
    def headings(self) -> Sequence[str]:
        """The column headings without the group column."""
        return self.columns[1:] if self.grouped else self.columns

    @property
    def groups(self) -> list[tuple[str, list[Sequence[str]]]]:
        """The groups as (name, rows) pairs. A name is empty if it is hidden."""
        if not self.grouped:
            return [("", [*self.rows])]
        found = [(name, [row[1:] for row in rows]) for name, rows in groupby(self.rows, key=lambda row: row[0])]
        return found if len(found) > 1 else [("", rows) for _, rows in found]

    @property
    def wrapped_columns(self) -> list[bool]:
        """For each column, whether its text is left-aligned and may wrap."""
        rows = [row for _, rows in self.groups for row in rows]
        return [at > 0 and any(len(row[at]) > _LONG_CELL_CHARS for row in rows) for at in range(len(self.headings))]

    @property
    def is_collapsed(self) -> bool:
        """Whether the table is initially collapsed."""
        return self.folded and len(self.rows) > _MAX_UNFOLDED_ROWS


@dataclass(frozen=True)
class ValueGrid:
    """A section with a grid of (name, text) pairs. If `title` is empty, the section has no heading."""

    title: str
    entries: Sequence[tuple[str, str]]
    note: str = ""


@dataclass(frozen=True)
class Paragraphs:
    """A section with paragraphs of text. If `title` is empty, the section has no heading."""

    title: str
    paragraphs: Sequence[str]


@dataclass(frozen=True)
class Tile:
    """A tile with a preview above lines of text. `source` is a data: URI. The first line is the name of the tile."""

    source: str
    lines: Sequence[str]

    def __post_init__(self) -> None:
        if not self.source.startswith("data:"):  # a browser would load any other URI
            raise ValueError(f"Tile.source: expected a data: URI, got {self.source[:40]}")


@dataclass(frozen=True)
class Tiles:
    """A row of tiles with a heading."""

    title: str
    tiles: Sequence[Tile]
    note: str = ""


@dataclass(frozen=True)
class Passage:
    """A generated text: the prompt, and its continuation, which is shown in another style. Line breaks are kept."""

    name: str
    prompt: str
    continuation: str


@dataclass(frozen=True)
class Passages:
    """A list of passages with a heading."""

    title: str
    passages: Sequence[Passage]
    note: str = ""


@dataclass(frozen=True)
class ProgressBar:
    """A section with a progress bar for `done` of `total` steps, and a grid of (name, text) pairs."""

    title: str
    done: int
    total: int
    entries: Sequence[tuple[str, str]]


Section = Table | Chart | Paragraphs | ValueGrid | Tiles | Passages | ProgressBar


def render_page(title: str, sections: Sequence[Section]) -> str:
    """Return a page with these sections as HTML."""
    return _render_document(title, sections, "page_still.js", 0)


def render_live_page(title: str, interval_ms: int) -> str:
    """Return a live page as HTML, which fetches its sections from the relative path `data` every `interval_ms`."""
    return _render_document(title, (), "page_live.js", interval_ms)


def render_live_sections(sections: Sequence[Section]) -> list[dict[str, Any]]:
    """Return a JSON-compatible dict for each section of a live page.

    Each dict contains a key that identifies the section across updates, its HTML, and its plotly figure.
    """
    inner = _load_template().module.inner  # type: ignore[attr-defined]
    return [
        {"key": f"{type(each).__name__} {each.title}", "html": inner(number, each).strip(), "figure": _get_figure(each)}
        for number, each in enumerate(sections)
    ]


def _render_document(title: str, sections: Sequence[Section], script: str, refresh_interval_ms: int) -> str:
    from plotly.offline import get_plotlyjs

    plotly = get_plotlyjs().replace("</script", "<\\/script")  # an unescaped </script would end the script element
    scripts = plotly, _read_file("page.js") + _read_file(script)
    digests = [b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in scripts]
    # Only </ can end a script element, so < is escaped in JSON.
    figures = [json.dumps(_get_figure(each), allow_nan=False).replace("<", "\\u003c") for each in sections]
    return _load_template().render(
        title=title,
        sections=sections,
        figures=[Markup("" if text == "null" else text) for text in figures],
        first_listed=next((at for at, each in enumerate(sections) if isinstance(each, Chart) and each.legend), None),
        interval_ms=refresh_interval_ms,
        hashes=Markup(" ".join(f"'sha256-{digest}'" for digest in digests)),
        style=Markup(_read_file("page.css")),
        plotly=Markup(plotly),
        script=Markup(scripts[1]),
    )


@cache
def _load_template() -> Template:
    """Return the template page.html, which escapes values for HTML and replaces unprintable characters."""
    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, finalize=_to_printable
    )
    return environment.from_string(_read_file("page.html"))


def _to_printable(value: object) -> object:
    return value if isinstance(value, Markup) else printable(str(value))


@cache
def _read_file(name: str) -> str:
    """Return the text of a file in this folder."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _get_figure(section: Section) -> dict[str, Any] | None:
    if not isinstance(section, Chart):
        return None
    return {**section.figure, "axes": section.axes, "legend": section.legend}
