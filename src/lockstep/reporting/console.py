"""Console output of a run: live progress on a terminal, and a line for each event otherwise."""

from typing import Final, TextIO, final

from rich.console import Group
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from lockstep.common.text import format_bytes
from lockstep.reporting import wording
from lockstep.reporting.terminal import is_interactive, make_console, make_progress_line, start_live
from lockstep.training.events import Done, Evaluated, Event, Logged, Saved, Skipped, Started, Stepped, Stopped, Warned

_REFRESH_INTERVAL_S: Final = 0.1


@final
class Console:
    """An event sink that writes to `stream`. `is_terminal` overrides the detection of whether the stream is a terminal.

    `run_dir` is the run folder, or None if the run doesn't save anything. `rate_rule` is a line of text that explains
    the learning rate. On a terminal, steps update a live display, and all other events are printed above it. Always
    call `close`, even after an error, to clear the live display.
    """

    def __init__(self, stream: TextIO, run_dir: str | None, rate_rule: str, is_terminal: bool | None = None) -> None:
        self._rich = make_console(stream, is_terminal)
        self._has_live_display = is_interactive(self._rich)
        self._stream = stream
        self._run_dir = run_dir
        self._rate_rule = rate_rule
        self._run: Started | None = None
        self._is_extended = False  # whether the latest start event extends a run that was already described
        self._live: Live | None = None  # shows the progress and metrics on a terminal
        self._start_time = 0.0
        self._last_drawn = -float("inf")
        self._evaluated = ""  # metrics of the latest evaluation as text
        self._running_means = wording.RunningMeans()

    def write(self, event: Event, time: float) -> None:
        match event:
            case Started():
                self._print_start(event, time)
            case Warned():
                self._print_line(f"warning: {event.text}")
            case Stepped():
                self._show_step(event, time)
            case Evaluated():
                self._print_line(wording.format_evaluation_line(event))
                self._evaluated = wording.format_task_metrics(event.figures, event.fractions)
            case Logged():
                self._print_line(wording.format_log_line(event))
            case Skipped():
                for line in wording.format_skip_lines(event):
                    self._print_line(line)
            case Saved():
                self._print_line(wording.format_save_line(event))
            case Stopped():
                self.close()
                self._print_line(
                    wording.format_stop_line(event, self._run_dir, self._run is None or bool(self._run.task))
                )
            case Done():
                self.close()
                self._print_summary(event)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _print_start(self, event: Started, time: float) -> None:
        """Print a description of the run, unless it has been printed before.

        A custom training loop can extend its run (epochs=epoch + 1), which writes another start event.
        """
        self.close()
        self._is_extended = self._run is not None
        self._run = event
        if not self._is_extended:
            for line in wording.format_start_lines(event, self._rate_rule):
                self._print_line(line)
        self._start_time, self._last_drawn, self._evaluated, self._running_means = (
            time,
            -float("inf"),
            "",
            wording.RunningMeans(),
        )
        if self._has_live_display:
            self._live = start_live(self._rich)

    def _show_step(self, event: Stepped, time: float) -> None:
        """Show the progress and metrics of a step. The live display is updated at most ten times per second."""
        run = self._run
        if run is None:
            return
        if self._live is None:
            metrics = wording.format_step_metrics(event, run, means=self._running_means.add(event))
            memory, left = format_bytes(event.peak_bytes), self._format_time_left(event, run, time)
            self._print_line(f"{wording.format_position(event, run)}  {metrics}  {memory}  {left}")
        elif time - self._last_drawn >= _REFRESH_INTERVAL_S or event.step == run.steps:
            self._last_drawn = time
            left = self._format_time_left(event, run, time)
            bar = make_progress_line(wording.format_position(event, run), event.step, run.steps, left)
            self._live.update(Group(bar, Text(wording.format_step_metrics(event, run, self._evaluated))), refresh=True)

    def _format_time_left(self, event: Stepped, run: Started, time: float) -> str:
        """Return the estimated remaining time as text, based on the average speed including evaluations and saves."""
        seconds_per_step = (time - self._start_time) / max(event.step - run.step, 1)
        return f"{wording.format_duration(seconds_per_step * (run.steps - event.step))} left"

    def _print_summary(self, event: Done) -> None:
        if self._run is not None and not self._is_extended:
            rows = wording.make_summary(event, self._run, self._run_dir)
            if self._has_live_display:
                self._rich.print(_make_table(rows))
            else:
                for line in wording.align_columns(rows):
                    self._print_line(line)
        self._print_line(wording.format_hash_line(event.weights_sha256))

    def _print_line(self, text: str) -> None:
        if self._has_live_display:
            # With soft_wrap, the terminal wraps long lines instead of rich. You can then copy a path or hash without
            # line breaks.
            self._rich.print(Text(text), soft_wrap=True)
        else:
            self._stream.write(text + "\n")
            self._stream.flush()


def _make_table(rows: list[wording.Row]) -> Table:
    table = Table(Column(style="bold"), Column(overflow="fold"), show_header=False)
    for name, value in rows:
        table.add_row(name, Text(value))
    return table
