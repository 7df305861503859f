"""`lockstep watch` below its options: what run folders hold now, read again and again. Nothing is written to them.

Of a log only what was added is read. Quick: no torch.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Final, final

from lockstep.common.text import printable_line
from lockstep.config.recorded import Recorded, recorded_configuration
from lockstep.errors import UsageError
from lockstep.launchers.batch import queued
from lockstep.reporting import jsonl
from lockstep.reporting.history import History, HistoryBuilder
from lockstep.reporting.notices import Notice, notice
from lockstep.reporting.run_page import Reported
from lockstep.reporting.status import Status, StatusBuilder
from lockstep.reporting.watched import Watched
from lockstep.run.listing import Found, Queue, as_run
from lockstep.run.machine_record import machine_of
from lockstep.run.runs import CONFIG, is_held, run_folders
from lockstep.run.submitted import Submitted, recorded

_AT_ONCE: Final = 20_000  # events, half a second: a log of millions does not keep Ctrl-C waiting
_NOTICES: Final = 50  # of a run, the last ones
_ASK_S: Final = 30.0  # between two questions to Slurm
_LOOK_S: Final = 3.0  # between two looks for new runs in a folder of some


@final
class Followed:
    """A run folder; `refresh` reads what was added to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._submitted: Submitted | None = None
        self._configuration = Recorded({}, {})
        self._problem = ""
        self._begin()

    def refresh(self) -> None:
        """Read what was added, of a long log a part: then `is_whole` is false until the rest was read too."""
        if self._tail.is_replaced():
            self._begin()
        held = is_held(self.folder)  # asked first: then what a run that has ended wrote last is in what is read below
        number = 0
        try:
            self._submitted = recorded(self.folder)
            for event in islice(self._tail.new(), _AT_ONCE):
                number += 1
                self._take(event)
            self._problem = ""
        except UsageError as error:
            if str(error) != self._problem:
                self._note(Notice(None, "warning", printable_line(str(error))))
            self._problem = str(error)
        self.is_whole = number < _AT_ONCE
        self._held = held or not self.is_whole
        while self._tail.problems:
            self._note(Notice(None, "warning", printable_line(self._tail.problems.popleft())))
        with suppress(KeyError, ValueError):  # of a last event that is none of this version: as it was
            self._last = self._status.status()
        if not self._configuration.recipe:
            self._configuration = recorded_configuration(self.folder / CONFIG)

    def watched(self, queue: Queue) -> Watched:
        """Return what was read so far; `queue` has the state of the run's job."""
        run = as_run(
            Found(self.folder, self._last, self._held, self._submitted, self._problem, self._configuration), queue
        )
        reported = Reported(run, self._history.history(), self._configuration.placement, machine_of(self.folder))
        return Watched(reported, tuple(self._notices), self.noticed, self.is_whole)

    def _begin(self) -> None:
        self._tail = jsonl.Tail(self.folder / jsonl.EVENTS)
        self._status, self._history = StatusBuilder(), HistoryBuilder()
        self._last = Status()
        self._notices: deque[Notice] = deque(maxlen=_NOTICES)
        self.noticed = 0  # notices so far, those that are no longer kept included
        self.is_whole = False
        self._held = True
        self._fractions: frozenset[str] = frozenset()

    def _take(self, event: dict[str, object]) -> None:
        try:
            self._status.take(event)
        except (KeyError, ValueError) as error:
            self._note(Notice(None, "warning", printable_line(f"an event of no known form is left out ({error!r})")))
            return
        self._history.take(event)
        if event.get("event") == "started":
            self._fractions = History(started=event).fractions
            self._configuration = Recorded({}, {})  # read anew: this start may have another placement
        if (found := notice(event, self._fractions)) is not None:
            self._note(found)

    def _note(self, notice: Notice) -> None:
        self._notices.append(notice)
        self.noticed += 1


@final
class Watch:
    """The runs in some folders, as they are each time that they are asked for.

    A run folder is watched in whatever state it is; of a folder of runs those that are going on, and those that begin
    later. With `wait` none of them need be there yet.
    """

    def __init__(self, folders: Sequence[Path], wait: bool) -> None:
        self._folders = folders
        self._wait = wait
        self._followed: dict[Path, Followed] = {}
        self._queue: Queue = None
        self._asked = self._looked = -float("inf")
        self.warning = ""  # that Slurm did not answer

    def refresh(self) -> list[Watched]:
        """Read what is new, and return the runs in the order in which they were found.

        UsageError, without `wait` and the first time alone, where a folder is not there or no run is going on.
        """
        now = time.monotonic()
        if now - self._looked >= _LOOK_S:
            self._look(first=not self._followed)
            self._looked = now
        for each in self._followed.values():
            each.refresh()
        return [each.watched(self._queue) for each in self._followed.values()]

    def _look(self, first: bool) -> None:
        """Find runs that are not followed yet."""
        runs = [each for folder in self._folders for each in self._runs(folder, first and not self._wait)]
        new = [(run, is_named) for run, is_named in runs if run not in self._followed]
        jobs = {
            run: job for run, job in ((run, _job(run)) for run in (*(run for run, _ in new), *self._followed)) if job
        }
        self._ask({*jobs.values()})
        waiting = {run for run, job in jobs.items() if self._queue and job in self._queue}
        self._followed |= {run: Followed(run) for run, is_named in new if is_named or is_held(run) or run in waiting}
        if not self._followed and not self._wait:
            raise UsageError(
                f"{', '.join(map(str, self._folders))}: no run is going on; name a run folder to see how it ended, "
                "list all with lockstep jobs, or wait for the next run with --wait"
            )

    def _runs(self, folder: Path, must_be_there: bool) -> Iterator[tuple[Path, bool]]:
        """Yield the runs in a folder, and for each whether it is the folder itself."""
        try:
            for run in run_folders(folder):
                yield run, run == folder
        except UsageError as error:
            if must_be_there:
                raise UsageError(f"{error}; a run that is about to begin is waited for with --wait") from None

    def _ask(self, jobs: set[int]) -> None:
        now = time.monotonic()
        if jobs and now - self._asked >= _ASK_S:
            self._queue, self.warning = queued(jobs)
            self._asked = now


def _job(run: Path) -> int | None:
    try:
        found = recorded(run)
    except UsageError:  # shown where the run is read
        return None
    return found.job if found else None
