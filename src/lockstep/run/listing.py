"""`lockstep jobs` below its options: what run folders and Slurm's queue hold of some runs. Quick: no torch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lockstep.config.recorded import Recorded, recorded_configuration
from lockstep.errors import UsageError
from lockstep.launchers.batch import queued
from lockstep.reporting import jsonl
from lockstep.reporting.overview import Run
from lockstep.reporting.status import Status, state, status
from lockstep.run.runs import CONFIG, failure, is_held, run_folders
from lockstep.run.submitted import Submitted, recorded

Queue = Mapping[int, tuple[str, str]] | None  # Slurm's states of jobs and the reasons; None where nobody could be asked


@dataclass(frozen=True)
class Found:
    """What a run folder holds; `held` says whether a process is at work in it, `problem` why it cannot be read."""

    folder: Path
    status: Status
    held: bool
    submitted: Submitted | None
    problem: str
    recorded: Recorded

    @property
    def time(self) -> float:
        """When something last happened to it, in seconds since 1970."""
        return max(self.status.time or 0, self.submitted.time if self.submitted else 0) or self.folder.stat().st_mtime


def listed(folders: Iterable[Path]) -> tuple[list[Run], list[str]]:
    """Return the runs in the folders, those that something happened to last first, and warnings."""
    found = [_found(run) for folder in folders for run in run_folders(folder)]
    found.sort(key=lambda each: each.time, reverse=True)
    queue, warning = queued({each.submitted.job for each in found if each.submitted})
    warnings = [*(each.problem for each in found), warning]
    return [as_run(each, queue) for each in found], [each for each in warnings if each]


def as_run(found: Found, queue: Queue) -> Run:
    """Return a run folder as a run of a table; `queue` has the state of its job and the reason."""
    folder, submitted = found.folder, found.submitted
    job, reason = (None, "") if queue is None or submitted is None else queue.get(submitted.job, ("", ""))
    judged = state(found.status, found.held, submitted.time if submitted else None, job)
    return Run(
        str(folder),
        "unreadable" if found.problem else judged,
        found.status,
        submitted.job if submitted else None,
        f"{job} ({reason})" if job and reason else job or "",
        found.recorded.recipe,
        failure(folder) if judged == "died" else "",
        found.recorded.placement,
    )


def _found(folder: Path) -> Found:
    logged, submitted, problem = Status(), None, ""
    log = folder / jsonl.EVENTS
    try:
        submitted = recorded(folder)
        logged = status(jsonl.read(log) if os.path.lexists(log) else ())
    except UsageError as error:
        problem = str(error)
    except (KeyError, ValueError) as error:
        problem = f"{log}: not a log of this version ({error!r})"
    return Found(folder, logged, is_held(folder), submitted, problem, recorded_configuration(folder / CONFIG))
