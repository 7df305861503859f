"""Terminal output: a rich console without automatic formatting, a live display, and a progress bar."""

from collections.abc import Collection, Mapping, Sequence
from typing import Final, TextIO

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

_ANY_WIDTH: Final = 1 << 16
_GAP: Final = 2  # number of spaces between two columns
_MIN_COLUMNS: Final = 4  # number of columns that are shown even if the terminal is too narrow


def make_console(stream: TextIO, terminal: bool | None = None) -> Console:
    """Return a rich console that writes text without automatic highlighting.

    `terminal` overrides the detection of whether `stream` is a terminal. The result is passed to rich explicitly,
    because rich would otherwise treat environment variables such as FORCE_COLOR as a sign of a terminal.
    """
    terminal = stream.isatty() if terminal is None else terminal
    return Console(file=stream, force_terminal=terminal, highlight=False, markup=False, emoji=False)


def is_interactive(console: Console) -> bool:
    """Return whether the console can update its output in place."""
    return console.is_terminal and not console.is_dumb_terminal


def start_live(console: Console) -> Live:
    """Start a live display. Each update replaces the previous content, and stopping the display clears it.

    The display has no refresh thread. A thread would slow down training, and forking worker processes from a
    multithreaded process isn't safe.
    """
    live = Live(console=console, auto_refresh=False, transient=True)
    live.start()
    console.show_cursor(True)  # Live hides the cursor, which would stay hidden if the process were killed
    return live


def make_progress_line(left_text: str, done: int, total: int, right_text: str) -> RenderableType:
    """Return a line with a progress bar between two texts. The line fills the width of the terminal."""
    line = Table.grid(Column(no_wrap=True), Column(ratio=1), Column(no_wrap=True), padding=(0, 1), expand=True)
    line.add_row(Text(left_text), ProgressBar(total=total, completed=done), Text(right_text))
    return line


def create_table(
    console: Console, columns: Mapping[str, Sequence[str]], styles: Sequence[str], text_headings: Collection[str]
) -> RenderableType:
    """Return a table. `columns` maps headings to cells, with the most important columns first.

    The columns in `text_headings` are left-aligned. If the terminal is too narrow, the last columns are omitted, and a
    line below the table lists their headings. `styles` contains the style of the `state` cell of each row.
    """
    shown, left_out = dict(columns), []
    while console.is_terminal and len(shown) > _MIN_COLUMNS and _measure_width(shown) > console.width:
        left_out.append(shown.popitem()[0])
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    for heading in shown:
        table.add_column(heading, justify="left" if heading in text_headings else "right", no_wrap=True)
    for number, style in enumerate(styles):
        table.add_row(*(Text(each[number], style if name == "state" else "") for name, each in shown.items()))
    return Group(
        table, *([Text(f"hidden, because the terminal is too narrow: {', '.join(left_out)}")] if left_out else [])
    )


def print_unwrapped(console: Console, renderable: RenderableType) -> None:
    """Print without trailing spaces, and without wrapping lines, which would make tables unreadable."""
    console.width = _ANY_WIDTH
    with console.capture() as drawn:
        console.print(renderable)
    console.file.writelines(f"{line.rstrip()}\n" for line in drawn.get().splitlines())


def _measure_width(columns: Mapping[str, Sequence[str]]) -> int:
    return sum(max(map(cell_len, (heading, *cells))) + _GAP for heading, cells in columns.items()) - _GAP
