"""The output of a comparison: a live display while it runs, then a table, a JSON file, a page and PNG files."""

import time
from pathlib import Path
from typing import Final, Self, TextIO, final

from rich.console import Group
from rich.live import Live
from rich.text import Text

from lockstep.common.text import printable
from lockstep.comparison.page import make_sections, make_title
from lockstep.comparison.result import Comparison, ResultRow, State, format_conclusions, make_table, to_json
from lockstep.reporting import wording
from lockstep.reporting.page import render_page
from lockstep.reporting.png import write_png
from lockstep.reporting.terminal import is_interactive, make_console, print_unwrapped, start_live

JSON: Final = "comparison.json"
PAGE: Final = "comparison.html"
_DRAW_INTERVAL_S: Final = 0.2


@final
class Display:
    """Shows a comparison while it is running.

    On a terminal, this is a live table. Otherwise, a line is printed whenever a run starts or ends.
    """

    def __init__(self, stream: TextIO) -> None:
        self._console = make_console(stream)
        self._live: Live | None = None
        self._last_draw_s = -float("inf")
        self._states: list[State] = []

    def __enter__(self) -> Self:
        self._live = start_live(self._console) if is_interactive(self._console) else None
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, comparison: Comparison) -> None:
        """Update the display with the current state of the comparison."""
        states = [row.state for row in comparison.rows]
        changed, self._states = states != self._states, states
        now_s = time.monotonic()
        if self._live is None:
            if changed:
                row = [candidate for candidate in comparison.rows if candidate.state != "waiting"][-1]
                self._console.print(Text(printable(_format_progress(row))), soft_wrap=True)
        elif changed or now_s - self._last_draw_s >= _DRAW_INTERVAL_S:
            self._last_draw_s = now_s
            left_s = comparison.left_s
            remaining = (
                ""
                if left_s is None
                else f"{wording.format_duration(left_s)} left in total, if the remaining runs take as long"
            )
            self._live.update(Group(make_table(comparison, self._console), Text(remaining)), refresh=True)


def write_results(
    comparison: Comparison, folder: Path, stream: TextIO, *, with_page: bool, with_png: bool
) -> list[Path]:
    """Print the results as a table, write them to files in `folder`, and return the paths of the files."""
    console = make_console(stream)
    print_unwrapped(console, make_table(comparison, console))
    for line in format_conclusions(comparison):
        console.print(Text(printable(line), style="bold red"), soft_wrap=True)
    paths = [folder / JSON]
    paths[0].write_text(to_json(comparison), encoding="utf-8")
    page_sections = make_sections(comparison)
    if with_page:
        paths.append(folder / PAGE)
        paths[1].write_text(render_page(make_title(comparison), page_sections), encoding="utf-8")
    if with_png:
        paths += write_png(page_sections, folder)
    return paths


def _format_progress(row: ResultRow) -> str:
    if row.state == "done":
        return f"{row.label}: done in {wording.format_duration(row.seconds or 0)}"
    return f"... {row.label}" if row.state == "running" else f"{row.label}: {row.state}: {row.reason}"
