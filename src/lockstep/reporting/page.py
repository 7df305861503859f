"""A page of tables and charts as a single HTML file that needs no network access.

Its Content-Security-Policy only allows its two scripts, by their hashes, and blocks all other resources. Text from runs
is escaped. Even without escaping, the browser wouldn't run the text as a script. A live page starts without sections.
It repeatedly fetches the sections from its own server, and makes no other requests.
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

_LONG_CELL_CHARS: Final = 24  # characters; a column with a longer cell is left-aligned and may wrap
_MAX_UNFOLDED_ROWS: Final = 10  # a foldable table with more rows is folded at first


@dataclass(frozen=True)
class Table:
    """A table with a heading. The first cell of each row is the name of the row.

    If the table is `grouped`, the first cell of each row is the name of its group instead. Consecutive rows of a group
    are shown below the name of the group. If there is only one group, its name is hidden. A `folded` table with more
    than ten rows is collapsed until the reader opens it.
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
        """The headings of the columns, without the column of the groups."""
        return self.columns[1:] if self.grouped else self.columns

    @property
    def groups(self) -> list[tuple[str, list[Sequence[str]]]]:
        """The rows by group. The name of a group is empty if it is hidden."""
        if not self.grouped:
            return [("", [*self.rows])]
        found = [(name, [row[1:] for row in rows]) for name, rows in groupby(self.rows, key=lambda row: row[0])]
        return found if len(found) > 1 else [("", rows) for _, rows in found]

    @property
    def long(self) -> list[bool]:
        """Whether each column is left-aligned and may wrap."""
        rows = [row for _, rows in self.groups for row in rows]
        return [at > 0 and any(len(row[at]) > _LONG_CELL_CHARS for row in rows) for at in range(len(self.headings))]

    @property
    def is_closed(self) -> bool:
        """Whether the table is collapsed at first."""
        return self.folded and len(self.rows) > _MAX_UNFOLDED_ROWS


@dataclass(frozen=True)
class Figures:
    """A section with a grid of (name, text) pairs. It has a heading unless `title` is empty."""

    title: str
    figures: Sequence[tuple[str, str]]
    note: str = ""


@dataclass(frozen=True)
class Words:
    """Paragraphs of text. They have a heading unless `title` is empty."""

    title: str
    paragraphs: Sequence[str]


@dataclass(frozen=True)
class Tile:
    """A tile with a preview and lines of text below it. `source` is a data: URI. The first line is the tile's name."""

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
    """A text that is shown line by line. The prompt `given` has a different style than the continuation `follows`."""

    name: str
    given: str
    follows: str


@dataclass(frozen=True)
class Passages:
    """A list of passages with a heading."""

    title: str
    passages: Sequence[Passage]
    note: str = ""


@dataclass(frozen=True)
class ProgressBar:
    """A progress bar that shows `done` of `total`, and a grid of named values."""

    title: str
    done: int
    total: int
    figures: Sequence[tuple[str, str]]


Section = Table | Chart | Words | Figures | Tiles | Passages | ProgressBar


def page(title: str, sections: Sequence[Section]) -> str:
    """Return the page as HTML."""
    return _document(title, sections, "page_still.js", 0)


def live_page(title: str, every_ms: int) -> str:
    """Return a live page as HTML. It fetches `live_parts` from the path `data` in the same folder."""
    return _document(title, (), "page_live.js", every_ms)


def live_parts(sections: Sequence[Section]) -> list[dict[str, Any]]:
    """Return the sections of a live page as JSON-compatible dicts.

    Each section has a key that identifies it across updates, its HTML, and its plotly figure.
    """
    inner = _template().module.inner  # type: ignore[attr-defined]
    return [
        {"key": f"{type(each).__name__} {each.title}", "html": inner(number, each).strip(), "figure": _figure(each)}
        for number, each in enumerate(sections)
    ]


def _document(title: str, sections: Sequence[Section], script: str, every_ms: int) -> str:
    from plotly.offline import get_plotlyjs

    plotly = get_plotlyjs().replace("</script", "<\\/script")  # an unescaped </script would end the script element
    scripts = plotly, _part("page.js") + _part(script)
    digests = [b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in scripts]
    # Only </ can end a script element, so < is escaped in JSON.
    figures = [json.dumps(_figure(each), allow_nan=False).replace("<", "\\u003c") for each in sections]
    return _template().render(
        title=title,
        sections=sections,
        figures=[Markup("" if text == "null" else text) for text in figures],
        first_listed=next((at for at, each in enumerate(sections) if isinstance(each, Chart) and each.legend), None),
        every_ms=every_ms,
        hashes=Markup(" ".join(f"'sha256-{digest}'" for digest in digests)),
        style=Markup(_part("page.css")),
        plotly=Markup(plotly),
        script=Markup(scripts[1]),
    )


@cache
def _template() -> Template:
    """Return the template page.html. It escapes values for HTML, and replaces unprintable characters."""
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
    if not isinstance(section, Chart):
        return None
    return {**section.figure, "axes": section.axes, "legend": section.legend}
