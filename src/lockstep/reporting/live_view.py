"""What a person sees who watches runs in a terminal: a view that is drawn anew each second; in a pipe, lines."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Final, TextIO, final

from rich.cells import set_cell_size
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lockstep.reporting.notices import Notice
from lockstep.reporting.overview import ago
from lockstep.reporting.text_curve import text_curve
from lockstep.reporting.watched import Watched, figures, headline, left, line, place, told

_STYLES: Final = {"running": "green", "died": "red", "unreadable": "red", "queued": "yellow", "saved": "cyan"}
_KINDS: Final = {"warning": "yellow", "start": "cyan", "evaluation": "", "checkpoint": "dim", "end": "bold"}
_CURVE: Final = "loss/train"
_HEIGHT: Final = 6  # lines of the curve of a run that is watched alone; among several each has one line
_NOTICES: Final = 8
_WAITING: Final = "waiting for a run to begin"
_LINE_S: Final = 10.0  # between two lines on the progress of a run, in a pipe
_BEFORE: Final = 5  # notices of a run that were there when the watch began, in a pipe


@final
class LiveView:
    """Shows runs on `stream`; `terminal` says whether it is one, left out it is asked.

    `show` draws the view, in a terminal in the place of the one before, and in a pipe writes lines on what is new;
    `close` clears the drawing. There is no thread that redraws.
    """

    def __init__(self, stream: TextIO, terminal: bool | None = None) -> None:
        terminal = stream.isatty() if terminal is None else terminal
        self._console = Console(file=stream, force_terminal=terminal, highlight=False, markup=False, emoji=False)
        self._stream = stream
        self._live: Live | None = None
        if terminal and not self._console.is_dumb_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
            # Live hides it until it is stopped; a process that is killed never stops it.
            self._console.show_cursor(True)
        self._waits = False
        self._seen: dict[str, int] = {}  # notices of a run that were written
        self._lines: dict[str, tuple[float, str]] = {}  # of a run: when the last line was written, and which it was

    def show(self, watched: Sequence[Watched], now: float) -> None:
        """Show the runs as they are at `now`, in seconds since 1970."""
        if self._live is not None:
            plain = self._console.options.ascii_only
            size = (self._console.width, self._console.height)
            self._live.update(drawing(watched, now, *size, curves=not plain), refresh=True)
            return
        found = [words for each in watched for words in self._new(each, now)]
        if not watched and not self._waits:
            self._waits = True
            found = [_WAITING]
        self._stream.write("".join(f"{words}\n" for words in found))
        self._stream.flush()

    def close(self) -> None:
        """Clear the drawing; the second time does nothing."""
        if self._live is not None:
            self._live.stop()

    def _new(self, each: Watched, now: float) -> list[str]:
        """Return lines on what is new of a run."""
        if not each.is_whole:
            return []
        seen = self._seen.get(each.name)
        self._seen[each.name] = each.noticed
        first = seen is None or each.noticed < seen  # the second where another run began in its folder
        fresh = _BEFORE if first else each.noticed - (seen or 0)
        found = [headline(each)] if first else []
        found += [f"{each.name}  {_clock(notice)}{notice.words}" for notice in each.notices[-fresh:] if fresh]
        written, before = self._lines.get(each.name, (0.0, ""))
        words = line(each)
        if words != before and place(each) and now - written >= _LINE_S and each.run.state == "running":
            self._lines[each.name] = (now, words)
            found.append(words)
        return found


def drawing(watched: Sequence[Watched], now: float, width: int, height: int, curves: bool = True) -> Group:
    """Return the view of some runs for a terminal of this size; without `curves` it has no character but ASCII's."""
    parts: list[RenderableType] = [] if watched else [Text(_WAITING)]
    for each in watched:
        parts += _run(each, now, width, _HEIGHT if len(watched) == 1 else 1, curves)
    room = max(height - len(parts) - 2, 0)
    notices = told(watched)[-min(_NOTICES, room) :] if room else []
    alone = len(watched) == 1
    for name, notice in notices:
        words = f"{_clock(notice)}{'' if alone else f'{name}  '}{notice.words}"
        parts.append(Text(_fitting(words, width), _KINDS[notice.kind]))
    return Group(*parts)


def _run(each: Watched, now: float, width: int, height: int, curves: bool) -> list[RenderableType]:
    """Return the lines of a run."""
    status = each.run.status
    parts: list[RenderableType] = [Text(_fitting(headline(each), width), _STYLES.get(each.run.state, "bold"))]
    if not each.is_whole:
        parts.append(Text(f"reading its log: {place(each)}"))
    elif status.step is not None:
        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column(no_wrap=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True)
        said = f"last event {ago(now - status.time)}" if status.time is not None else ""
        total = max(status.steps or status.step, 1)
        words = "  ".join(word for word in (left(each), said) if word)
        bar.add_row(Text(place(each)), ProgressBar(total=total, completed=status.step), Text(words))
        parts.append(bar)
        parts.append(Text(_fitting(figures(each), width)))
    if each.run.failure:
        parts.append(Text(each.run.failure, "red"))
    points = each.history.curves.get(_CURVE, ())
    if curves and (drawn := text_curve(points, max(min(width, 100) - 20, 10), height)):
        values = [point.value for point in points if math.isfinite(point.value)]
        ends = {0: f"{max(values):.4g}", len(drawn) - 1: f"{min(values):.4g}"} if height > 1 else {0: ""}
        edge = "│" if height > 1 else ""
        parts += [Text(f"{ends.get(row, ''):>10} {edge}{text}", "cyan") for row, text in enumerate(drawn)]
        if height > 1:
            parts.append(Text(f"{'':>11}{_CURVE} over samples", "dim"))
    return [*parts, Text("")]


def _fitting(words: str, width: int) -> str:
    """Return so much of the words as one line has room for."""
    return set_cell_size(words, width).rstrip()


def _clock(notice: Notice) -> str:
    """Return the time of day of a notice, as the watcher's clock has it."""
    return "" if notice.time is None else f"{time.strftime('%H:%M:%S', time.localtime(notice.time))}  "
