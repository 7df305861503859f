"""What is drawn on a terminal: rich's console without its guesses, a line that is redrawn in place, a progress bar."""

from typing import TextIO

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text


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
