"""Reads run folders and the Slurm queue for `jobs`, `watch` and `report`.

This module doesn't write files, doesn't run code from a run folder, and doesn't import torch.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Final, final

from lockstep.common.text import printable_line
from lockstep.config.recorded import CONFIG_NAME, RecordedConfig, format_resume_command, read_recorded_config
from lockstep.errors import UsageError
from lockstep.launchers.batch import query_states
from lockstep.reporting import jsonl
from lockstep.reporting.notices import Notice, make_notice
from lockstep.reporting.run_log import History, RunLog, RunStart
from lockstep.reporting.run_view import RunView, determine_state
from lockstep.runs.runs import (
    SubmittedJob,
    describe_machine,
    find_checkpoint_steps,
    find_run_folders,
    is_locked,
    read_failure_reason,
    read_job,
)

_EVENTS_PER_REFRESH: Final = 20_000  # limits a refresh to about half a second, so that Ctrl-C is handled quickly
_MAX_KEPT_NOTICES: Final = 50  # number of most recent notices to keep for each run
_QUERY_S: Final = 30.0  # minimum time between two queries to Slurm
_SEARCH_S: Final = 3.0  # minimum time between two searches for new runs

JobStates = Mapping[int, tuple[str, str]] | None  # state and reason by job ID; None if Slurm isn't available


@final
class RunReader:
    """Reads a run folder. `refresh` reads new events, and `make_view` returns the state after all events so far.

    A line that isn't an event of this version is skipped with a notice. With `strict`, such a line makes the run
    unreadable, and `problem` describes it.
    """

    def __init__(self, folder: Path, *, strict: bool = False) -> None:
        self.folder = folder
        self._strict = strict
        self._submitted: SubmittedJob | None = None
        self._configuration = RecordedConfig({}, {})
        self.problem = ""
        self._reset()

    @property
    def time(self) -> float:
        """The time of the last event or submission, or else of the last change to the folder, in seconds since 1970."""
        submitted = self._submitted.time if self._submitted else 0
        return max(self._log.make_status().time or 0, submitted) or self.folder.stat().st_mtime

    @property
    def job(self) -> int | None:
        """The Slurm job ID of the last submitted job, or None."""
        return self._submitted.job if self._submitted else None

    def refresh(self) -> None:
        """Read new events.

        Unless the reader is strict, each call reads a limited number of events. `is_fully_read` is false until the
        remaining events are read.
        """
        limit = None if self._strict else _EVENTS_PER_REFRESH
        if self._tail.is_replaced():
            self._reset()
        self._is_in_use = is_locked(
            self.folder
        )  # check this first: if the run ends now, its last events are read below
        num_events, problem = 0, ""
        try:
            self._submitted = read_job(self.folder)
            for event in islice(self._tail.read_new_events(), limit):
                num_events += 1
                self._add_event(event)
        except UsageError as error:
            problem = str(error)
        if problem and problem != self.problem:
            self._warn(problem)
        self.problem = problem
        self.is_fully_read = num_events != limit
        while self._tail.problems:
            self._warn(self._tail.problems.popleft())
        if not self._configuration.recipe:
            self._configuration = read_recorded_config(self.folder / CONFIG_NAME)

    def make_view(self, queue: JobStates) -> RunView:
        """Return the state of the run after all events read so far. `queue` contains the state of each Slurm job."""
        history = History() if self.problem and self._strict else self._log.make_history()
        job, reason = (None, "") if queue is None or self.job is None else queue.get(self.job, ("", ""))
        submitted = self._submitted.time if self._submitted else None
        run_state = determine_state(history.status, self._is_in_use or not self.is_fully_read, submitted, job)
        # A run in state "saved" may have been started again, and failed before its first event. This counts as failed.
        has_ended = run_state in ("died", "saved")
        failed = read_failure_reason(self.folder, ignore_transient=run_state == "saved") if has_ended else ""
        return RunView(
            str(self.folder),
            "unreadable" if self.problem else "failed" if failed else run_state,
            history,
            self.job,
            f"{job} ({reason})" if job and reason else job or "",
            self._configuration.recipe,
            _get_actual_placement(self._configuration.placement, history.starts),
            failed,
            describe_machine(self.folder),
            tuple(self._notices),
            self._notice_count,
            self.is_fully_read,
            find_checkpoint_steps(self.folder),
            format_resume_command(self.folder) if self._configuration.recipe else "",
        )

    def _reset(self) -> None:
        self._tail = jsonl.Tail(self.folder / jsonl.EVENTS, strict=self._strict)
        self._log = RunLog()
        self._notices: deque[Notice] = deque(maxlen=_MAX_KEPT_NOTICES)
        self._notice_count = 0  # number of all notices so far, including dropped notices
        self.is_fully_read = False
        self._is_in_use = True

    def _add_event(self, event: dict[str, object]) -> None:
        try:
            self._log.add(event)
        except (KeyError, ValueError) as error:
            if self._strict:
                log = self.folder / jsonl.EVENTS
                raise UsageError(
                    f"{log}: was not written by this version of Lockstep ({error!r}); use the version that wrote it"
                ) from error
            self._warn(f"an event with an unknown format was skipped ({error!r})")
            return
        if event.get("event") == "started":
            self._configuration = RecordedConfig({}, {})  # read again, because the placement may have changed
        if (new_notice := make_notice(event, self._log.fractions)) is not None:
            self._add_notice(new_notice)

    def _warn(self, text: str) -> None:
        self._add_notice(Notice(None, "warning", printable_line(text)))

    def _add_notice(self, notice: Notice) -> None:
        self._notices.append(notice)
        self._notice_count += 1


def _get_actual_placement(placement: Mapping[str, str], starts: Sequence[RunStart]) -> Mapping[str, str]:
    """Return the configured placement, with the strategy and number of processes that the last start actually used."""
    if not placement or not starts:
        return placement
    started = {"strategy.name": starts[-1].strategy, "processes": str(starts[-1].processes or "")}
    return {**placement, **{key: value for key, value in started.items() if value}}


def read_runs(folders: Iterable[Path]) -> tuple[list[RunView], list[str]]:
    """Return the runs in the folders without duplicates, most recently active first, and a list of warnings."""
    readers = [RunReader(run, strict=True) for run in find_run_folders(*folders)]
    for reader in readers:
        reader.refresh()
    readers.sort(key=lambda reader: reader.time, reverse=True)
    queue, warning = query_states({reader.job for reader in readers if reader.job})
    warnings = [*(reader.problem for reader in readers), warning]
    return [reader.make_view(queue) for reader in readers], [text for text in warnings if text]


def read_runs_by_name(folders: Sequence[Path]) -> tuple[list[RunView], list[str]]:
    """Return the runs in the folders, sorted by name, and a list of warnings. Raise UsageError if there are no runs.

    Folders are searched as in `lockstep jobs`. No code of a run is executed, and nothing is unpickled.
    """
    runs, warnings = read_runs(folders)
    if not runs:
        raise UsageError(f"{', '.join(map(str, folders))}: no runs found; pass run folders, or a folder of runs")
    return sorted(runs, key=lambda run: run.folder), warnings


@final
class RunWatcher:
    """Watches the runs in some folders.

    A run folder in `folders` is always watched. In a folder of runs, only runs that are queued or in progress, or start
    later, are watched. With `wait`, the folders don't have to exist yet.
    """

    def __init__(self, folders: Sequence[Path], wait: bool) -> None:
        self._folders = folders
        self._wait = wait
        self._readers: dict[Path, RunReader] = {}
        self._queue: JobStates = None
        self._last_query_s = self._last_search_s = -float("inf")
        self.warning = ""  # set if the last query to Slurm failed

    def refresh(self) -> list[RunView]:
        """Read new events. Return the runs in the order in which they were found.

        The first call raises UsageError if a folder doesn't exist or if no run is in progress, unless `wait` is set.
        """
        time_s = time.monotonic()
        if time_s - self._last_search_s >= _SEARCH_S:
            self._find_runs(is_first_call=not self._readers)
            self._last_search_s = time_s
        for reader in self._readers.values():
            reader.refresh()
        return [reader.make_view(self._queue) for reader in self._readers.values()]

    def _find_runs(self, is_first_call: bool) -> None:
        """Find runs that aren't watched yet, and start to watch them."""
        runs = [
            run for folder in self._folders for run in self._find_in_folder(folder, is_first_call and not self._wait)
        ]
        unwatched = {run: is_named for run, is_named in runs if run not in self._readers}
        jobs = {run: job for run in (*unwatched, *self._readers) if (job := _read_job_id(run))}
        self._query_slurm({*jobs.values()})
        queued = {run for run, job in jobs.items() if self._queue and job in self._queue}
        to_watch = [run for run, is_named in unwatched.items() if is_named or is_locked(run) or run in queued]
        self._readers |= {run: RunReader(run) for run in to_watch}
        if not self._readers and not self._wait:
            raise UsageError(
                f"{', '.join(map(str, self._folders))}: no run is in progress; pass a run folder to see how it ended, "
                "list all runs with lockstep jobs, or wait for the next run with --wait"
            )

    def _find_in_folder(self, folder: Path, must_exist: bool) -> Iterator[tuple[Path, bool]]:
        """Yield each run folder in `folder`, and whether it is `folder` itself.

        If `folder` doesn't exist, yield nothing or, if `must_exist` is set, raise UsageError.
        """
        try:
            for run in find_run_folders(folder):
                yield run, run == folder
        except UsageError as error:
            if must_exist:
                raise UsageError(f"{error}; to wait for a run that is about to start, use --wait") from None

    def _query_slurm(self, jobs: set[int]) -> None:
        time_s = time.monotonic()
        if jobs and time_s - self._last_query_s >= _QUERY_S:
            self._queue, self.warning = query_states(jobs)
            self._last_query_s = time_s


def _read_job_id(run: Path) -> int | None:
    try:
        submitted = read_job(run)
    except UsageError:  # reported when the run is read
        return None
    return submitted.job if submitted else None
