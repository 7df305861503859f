"""What run folders and Slurm's queue hold, for `jobs`, `watch` and `report`. Nothing is written or run. No torch."""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Final, final

from lockstep.common.text import printable_line
from lockstep.config.recorded import CONFIG, RecordedConfig, read_recorded_config
from lockstep.errors import UsageError
from lockstep.launchers.batch import queue_states
from lockstep.reporting import jsonl
from lockstep.reporting.notices import Notice, notice
from lockstep.reporting.run_log import History, RunLog, RunStart
from lockstep.reporting.run_view import RunView, state
from lockstep.runs.runs import Submitted, failure, is_held, job_of, machine_of, run_folders

_AT_ONCE: Final = 20_000  # events, half a second: a log of millions does not keep Ctrl-C waiting
_NOTICES: Final = 50  # of a run, the last ones
_ASK_S: Final = 30.0  # between two questions to Slurm
_LOOK_S: Final = 3.0  # between two looks for new runs in a folder of some

Queue = Mapping[int, tuple[str, str]] | None  # Slurm's states of jobs and the reasons; None where nobody could be asked


@final
class RunReader:
    """A run folder; each `refresh` reads what was added to it, and `view` is what was read so far.

    A line that is no event of this version is left out with a notice; where the reader is `strict`, it is the `problem`
    for which the run cannot be read.
    """

    def __init__(self, folder: Path, *, strict: bool = False) -> None:
        self.folder = folder
        self._strict = strict
        self._submitted: Submitted | None = None
        self._configuration = RecordedConfig({}, {})
        self.problem = ""
        self._begin()

    @property
    def time(self) -> float:
        """When something last happened to it, in seconds since 1970."""
        submitted = self._submitted.time if self._submitted else 0
        return max(self._log.status().time or 0, submitted) or self.folder.stat().st_mtime

    @property
    def job(self) -> int | None:
        """The number of its last job."""
        return self._submitted.job if self._submitted else None

    def refresh(self) -> None:
        """Read what was added. Unless strict, of a long log a part: `is_whole` is false until the rest was read too."""
        at_most = None if self._strict else _AT_ONCE
        if self._tail.is_replaced():
            self._begin()
        self._held = is_held(self.folder)  # first: what a run that has ended since wrote last is in what is read below
        number, problem = 0, ""
        try:
            self._submitted = job_of(self.folder)
            for event in islice(self._tail.new(), at_most):
                number += 1
                self._take(event)
        except UsageError as error:
            problem = str(error)
        if problem and problem != self.problem:
            self._warn(problem)
        self.problem = problem
        self.is_whole = number != at_most
        while self._tail.problems:
            self._warn(self._tail.problems.popleft())
        if not self._configuration.recipe:
            self._configuration = read_recorded_config(self.folder / CONFIG)

    def view(self, queue: Queue) -> RunView:
        """Return the run by what was read so far; `queue` has the state of its job and the reason."""
        history = History() if self.problem and self._strict else self._log.history()
        job, reason = (None, "") if queue is None or self.job is None else queue.get(self.job, ("", ""))
        submitted = self._submitted.time if self._submitted else None
        judged = state(history.status, self._held or not self.is_whole, submitted, job)
        failed = failure(self.folder) if judged == "died" else ""
        return RunView(
            str(self.folder),
            "unreadable" if self.problem else "failed" if failed else judged,
            history,
            self.job,
            f"{job} ({reason})" if job and reason else job or "",
            self._configuration.recipe,
            _ran_on(self._configuration.placement, history.starts),
            failed,
            machine_of(self.folder),
            tuple(self._notices),
            self._noticed,
            self.is_whole,
        )

    def _begin(self) -> None:
        self._tail = jsonl.Tail(self.folder / jsonl.EVENTS, strict=self._strict)
        self._log = RunLog()
        self._notices: deque[Notice] = deque(maxlen=_NOTICES)
        self._noticed = 0  # notices so far, those that are no longer kept included
        self.is_whole = False
        self._held = True

    def _take(self, event: dict[str, object]) -> None:
        try:
            self._log.take(event)
        except (KeyError, ValueError) as error:
            if self._strict:
                log = self.folder / jsonl.EVENTS
                raise UsageError(f"{log}: not a log of this version ({error!r})") from error
            self._warn(f"an event of no known form is left out ({error!r})")
            return
        if event.get("event") == "started":
            self._configuration = RecordedConfig({}, {})  # read anew: this start may have another placement
        if (found := notice(event, self._log.fractions)) is not None:
            self._note(found)

    def _warn(self, text: str) -> None:
        self._note(Notice(None, "warning", printable_line(text)))

    def _note(self, notice: Notice) -> None:
        self._notices.append(notice)
        self._noticed += 1


def _ran_on(placement: Mapping[str, str], starts: Sequence[RunStart]) -> Mapping[str, str]:
    """Return a known placement with what the last start made of `auto` and `fastest`."""
    if not placement or not starts:
        return placement
    found = {"strategy.name": starts[-1].strategy, "processes": str(starts[-1].processes or "")}
    return {**placement, **{key: each for key, each in found.items() if each}}


def read_runs(folders: Iterable[Path]) -> tuple[list[RunView], list[str]]:
    """Return the runs in the folders, each once, those that something happened to last first, and warnings."""
    readers = [RunReader(run, strict=True) for run in run_folders(*folders)]
    for reader in readers:
        reader.refresh()
    readers.sort(key=lambda reader: reader.time, reverse=True)
    queue, warning = queue_states({reader.job for reader in readers if reader.job})
    warnings = [*(reader.problem for reader in readers), warning]
    return [reader.view(queue) for reader in readers], [each for each in warnings if each]


def runs_by_name(folders: Sequence[Path]) -> tuple[list[RunView], list[str]]:
    """Return the runs in the folders, in the order of their names, and warnings; no run at all is an error.

    Which folders hold runs is decided as for `lockstep jobs`. Nothing of a run is executed, nothing is unpickled.
    """
    runs, warnings = read_runs(folders)
    if not runs:
        raise UsageError(f"{', '.join(map(str, folders))}: no runs; name run folders, or a folder of some")
    return sorted(runs, key=lambda run: run.folder), warnings


@final
class Watch:
    """The runs in some folders, as they are each time that they are asked for.

    A run folder is watched in whatever state it is; of a folder of runs those that are going on, and those that begin
    later. With `wait` none of them need be there yet.
    """

    def __init__(self, folders: Sequence[Path], wait: bool) -> None:
        self._folders = folders
        self._wait = wait
        self._readers: dict[Path, RunReader] = {}
        self._queue: Queue = None
        self._asked = self._looked = -float("inf")
        self.warning = ""  # that Slurm did not answer

    def refresh(self) -> list[RunView]:
        """Read what is new, and return the runs in the order in which they were found.

        UsageError, without `wait` and the first time alone, where a folder is not there or no run is going on.
        """
        now = time.monotonic()
        if now - self._looked >= _LOOK_S:
            self._look(first=not self._readers)
            self._looked = now
        for each in self._readers.values():
            each.refresh()
        return [each.view(self._queue) for each in self._readers.values()]

    def _look(self, first: bool) -> None:
        """Find runs that are not followed yet."""
        runs = [each for folder in self._folders for each in self._runs(folder, first and not self._wait)]
        new = {run: is_named for run, is_named in runs if run not in self._readers}
        jobs = {run: job for run in (*new, *self._readers) if (job := _job(run))}
        self._ask({*jobs.values()})
        waiting = {run for run, job in jobs.items() if self._queue and job in self._queue}
        found = [run for run, is_named in new.items() if is_named or is_held(run) or run in waiting]
        self._readers |= {run: RunReader(run) for run in found}
        if not self._readers and not self._wait:
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
            self._queue, self.warning = queue_states(jobs)
            self._asked = now


def _job(run: Path) -> int | None:
    try:
        found = job_of(run)
    except UsageError:  # shown where the run is read
        return None
    return found.job if found else None
