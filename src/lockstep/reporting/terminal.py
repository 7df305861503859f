"""What is drawn on a terminal: rich's console without its guesses, a line that is redrawn in place, a progress bar."""

from collections.abc import Collection, Mapping, Sequence
from typing import Final, TextIO

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

_ANY_WIDTH: Final = 1 << 16
_GAP: Final = 2  # between two columns
_LEAST: Final = 4  # columns that stay, even where lines are then longer than the terminal is wide


def terminal_on(stream: TextIO, terminal: bool | None = None) -> Console:
    """Return a console that writes text unchanged; `terminal` says whether it is one; by default the stream decides.

    Said outright, because rich would take an environment variable about colours for a terminal.
    """
    terminal = stream.isatty() if terminal is None else terminal
    return Console(file=stream, force_terminal=terminal, highlight=False, markup=False, emoji=False)


def is_moving(console: Console) -> bool:
    """Return whether what was drawn can be drawn over."""
    return console.is_terminal and not console.is_dumb_terminal


def live_on(console: Console) -> Live:
    """Start a drawing that is replaced by each update and cleared when it stops.

    There is no thread that redraws: it would take time from a training process, and a process with threads should not
    fork workers.
    """
    live = Live(console=console, auto_refresh=False, transient=True)
    live.start()
    console.show_cursor(True)  # Live hides it until it is stopped; a process that is killed never stops it
    return live


def progress_line(place: str, done: int, total: int, after: str) -> RenderableType:
    """Return a bar between words, as wide as the terminal."""
    line = Table.grid(Column(no_wrap=True), Column(ratio=1), Column(no_wrap=True), padding=(0, 1), expand=True)
    line.add_row(Text(place), ProgressBar(total=total, completed=done), Text(after))
    return line


def table(
    console: Console, columns: Mapping[str, Sequence[str]], styles: Sequence[str], texts: Collection[str]
) -> RenderableType:
    """Return a table of columns by their headings, the most important first, and of `texts`, which begin at the left.

    Where a terminal has no room for all, it is said which of the last are left out. `styles` are those of states.
    """
    shown, left_out = dict(columns), []
    while console.is_terminal and len(shown) > _LEAST and _width(shown) > console.width:
        left_out.append(shown.popitem()[0])
    found = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    for heading in shown:
        found.add_column(heading, justify="left" if heading in texts else "right", no_wrap=True)
    for number, style in enumerate(styles):
        found.add_row(*(Text(each[number], style if name == "state" else "") for name, each in shown.items()))
    return Group(found, *([Text(f"left out, for want of room: {', '.join(left_out)}")] if left_out else []))


def print_unfolded(console: Console, drawing: RenderableType) -> None:
    """Print lines as long as they are, and without spaces at their ends: folded cells could not be read."""
    console.width = _ANY_WIDTH
    with console.capture() as drawn:
        console.print(drawing)
    console.file.writelines(f"{line.rstrip()}\n" for line in drawn.get().splitlines())


def _width(columns: Mapping[str, Sequence[str]]) -> int:
    return sum(max(map(cell_len, (heading, *cells))) + _GAP for heading, cells in columns.items()) - _GAP
