"""The two lines at the foot of a terminal that move while a run trains."""

from __future__ import annotations

from typing import Final, final

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lockstep.reporting import wording
from lockstep.training.events import Started, Stepped

_SECONDS_BETWEEN_DRAWINGS: Final = 0.1


@final
class Progress:
    """Shows where the run is and its figures, drawn when a step is reported, at most ten times a second.

    There is no thread that redraws: it would take time from the training process, and a process with threads
    should not fork loader workers.
    """

    def __init__(self, console: Console, run: Started, time: float) -> None:
        self._run = run
        self._began = time
        self._drawn = -float("inf")
        self._last = ""
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._live.start()
        # Live hides the cursor until it is stopped; a process that is killed never stops it.
        console.show_cursor(True)

    def evaluated(self, words: str) -> None:
        """Show the last evaluation's figures from now on."""
        self._last = words

    def step(self, event: Stepped, time: float) -> None:
        """Move to a step."""
        if time - self._drawn >= _SECONDS_BETWEEN_DRAWINGS or event.step == self._run.steps:
            self._drawn = time
            self._live.update(self._drawing(event, time), refresh=True)

    def stop(self) -> None:
        """Clear the lines; the second time does nothing."""
        self._live.stop()

    def _drawing(self, event: Stepped, time: float) -> Group:
        line = Table.grid(padding=(0, 1), expand=True)
        line.add_column(no_wrap=True)
        line.add_column(ratio=1)
        line.add_column(no_wrap=True)
        left = f"{wording.duration(self._left(event.step, time))} left"
        bar = ProgressBar(total=self._run.steps, completed=event.step)
        line.add_row(Text(wording.place(event, self._run)), bar, Text(left))
        return Group(line, Text(wording.figures(event, self._run, self._last)))

    def _left(self, step: int, time: float) -> float:
        """Return the seconds left, if the run continues as it did: evaluation and saving are in."""
        done = max(step - self._run.step, 1)
        return (time - self._began) / done * (self._run.steps - step)
