"""The output of `lockstep watch`: a view that is updated every second on a terminal, and lines of text otherwise."""

import math
from collections.abc import Sequence
from typing import Final, TextIO, final

from rich.cells import set_cell_size
from rich.console import Group, RenderableType
from rich.text import Text

from lockstep.reporting.jobs_table import format_age
from lockstep.reporting.run_view import (
    STYLES,
    RunView,
    format_eta,
    format_headline,
    format_metrics,
    format_progress,
    format_status_line,
    format_time_of_day,
    join_nonempty,
    select_latest_notices,
)
from lockstep.reporting.terminal import is_interactive, make_console, make_progress_line, start_live
from lockstep.reporting.text_curve import draw_text_curve

_KIND_STYLES: Final = {"warning": "yellow", "start": "cyan", "evaluation": "", "checkpoint": "dim", "end": "bold"}
_CURVE_NAME: Final = "loss/train"
_CURVE_HEIGHT: Final = 6  # height of the curve if there is a single run; otherwise, each curve has one line
_MAX_NOTICES: Final = 8
_WAITING_MESSAGE: Final = "waiting for a run to start"
_LINE_INTERVAL_S: Final = 10.0  # minimum number of seconds between progress lines of a run, if not on a terminal
_INITIAL_NOTICES: Final = 5  # number of earlier notices that are printed at first, if not on a terminal


@final
class LiveView:
    """Shows runs on `stream`. `is_terminal` overrides the detection of whether the stream is a terminal.

    On a terminal, `show` updates the view in place, and `close` clears the view. Otherwise, `show` prints lines about
    new events.
    """

    def __init__(self, stream: TextIO, is_terminal: bool | None = None) -> None:
        self._console = make_console(stream, is_terminal)
        self._stream = stream
        self._live = start_live(self._console) if is_interactive(self._console) else None
        self._waiting_shown = False
        self._notice_counts: dict[str, int] = {}  # number of printed notices by run
        self._last_lines: dict[str, tuple[float, str]] = {}  # time and text of the last progress line by run

    def show(self, runs: Sequence[RunView], now: float) -> None:
        """Show the current state of the runs. `now` is the time in seconds since 1970."""
        if self._live is not None:
            plain = self._console.options.ascii_only
            size = (self._console.width, self._console.height)
            self._live.update(render_runs(runs, now, *size, show_curves=not plain), refresh=True)
            return
        lines = [line for run in runs for line in self._collect_new_lines(run, now)]
        if not runs and not self._waiting_shown:
            self._waiting_shown = True
            lines = [_WAITING_MESSAGE]
        self._stream.write("".join(f"{line}\n" for line in lines))
        self._stream.flush()

    def close(self) -> None:
        """Clear the view. Calling it again is a no-op."""
        if self._live is not None:
            self._live.stop()

    def _collect_new_lines(self, run: RunView, now: float) -> list[str]:
        """Return lines about the events of a run since the previous call."""
        if not run.is_fully_read:
            return []
        seen = self._notice_counts.get(run.name)
        self._notice_counts[run.name] = run.notice_count
        first = (
            seen is None or run.notice_count < seen
        )  # if the number of notices decreased, a new run replaced this run
        num_new = _INITIAL_NOTICES if first else run.notice_count - (seen or 0)
        lines = [format_headline(run)] if first else []
        lines += [
            join_nonempty(run.name, format_time_of_day(each.time), each.text)
            for each in run.notices[-num_new:]
            if num_new
        ]
        written, before = self._last_lines.get(run.name, (0.0, ""))
        line = format_status_line(run)
        if line != before and format_progress(run) and now - written >= _LINE_INTERVAL_S and run.state == "running":
            self._last_lines[run.name] = (now, line)
            lines.append(line)
        return lines


def render_runs(runs: Sequence[RunView], now: float, width: int, height: int, show_curves: bool = True) -> Group:
    """Return the view of `runs` for a terminal of this size. If `show_curves` is False, the view is pure ASCII."""
    parts: list[RenderableType] = [] if runs else [Text(_WAITING_MESSAGE)]
    is_single = len(runs) == 1
    for run in runs:
        parts += _render_run(run, now, width, _CURVE_HEIGHT if is_single else 1, show_curves)
    for name, notice in select_latest_notices(runs, min(_MAX_NOTICES, max(height - len(parts) - 2, 0))):
        words = join_nonempty(format_time_of_day(notice.time), "" if is_single else name, notice.text)
        parts.append(Text(_truncate(words, width), _KIND_STYLES[notice.kind]))
    return Group(*parts)


def _render_run(run: RunView, now: float, width: int, height: int, show_curves: bool) -> list[RenderableType]:
    """Return the lines that show the state, progress, metrics and loss curve of a run."""
    status = run.status
    parts: list[RenderableType] = [Text(_truncate(format_headline(run), width), STYLES.get(run.state, "red") or "bold")]
    if not run.is_fully_read:
        parts.append(Text(f"reading its log: {format_progress(run)}"))
    elif status.step is not None:
        last = f"last event {format_age(now - status.time)}" if status.time is not None else ""
        total = max(status.steps or status.step, 1)
        parts.append(make_progress_line(format_progress(run), status.step, total, join_nonempty(format_eta(run), last)))
        parts.append(Text(_truncate(format_metrics(run), width)))
    if run.failure:
        parts.append(Text(run.failure, "red"))
    points = run.history.curves.get(_CURVE_NAME, ())
    if show_curves and (curve_lines := draw_text_curve(points, max(min(width, 100) - 20, 10), height)):
        values = [point.value for point in points if math.isfinite(point.value)]
        ends = {0: f"{max(values):.4g}", len(curve_lines) - 1: f"{min(values):.4g}"} if height > 1 else {0: ""}
        edge = "│" if height > 1 else ""
        parts += [Text(f"{ends.get(row, ''):>10} {edge}{text}", "cyan") for row, text in enumerate(curve_lines)]
        if height > 1:
            parts.append(Text(f"{'':>11}{_CURVE_NAME} over samples", "dim"))
    return [*parts, Text("")]


def _truncate(text: str, width: int) -> str:
    """Truncate text to a width in terminal columns."""
    return set_cell_size(text, width).rstrip()
