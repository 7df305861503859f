"""Show how runs are doing: state, progress, speed and time left, from their event logs and Slurm's queue."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from lockstep.commands import _completion
from lockstep.core.text import printable_line
from lockstep.errors import UsageError

if TYPE_CHECKING:
    from lockstep.reporting.overview import Run
    from lockstep.reporting.status import Status
    from lockstep.run.submitted import Submitted

_PATIENCE_S: Final = 5.0  # for squeue; a controller that is overloaded lets it wait for minutes


@dataclass(frozen=True)
class _Found:
    """What a run folder says by itself; `problem` is why it cannot be read."""

    folder: Path
    status: Status
    held: bool
    submitted: Submitted | None
    problem: str | None
    recipe: Mapping[str, str]
    failure: str

    @property
    def time(self) -> float:
        """When something last happened to it, in seconds since 1970."""
        return max(self.status.time or 0, self.submitted.time if self.submitted else 0) or self.folder.stat().st_mtime


@click.command("jobs")
@click.argument("folders", nargs=-1, metavar="[FOLDER]...", shell_complete=_completion.files)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list with an object for each run.")
def command(folders: tuple[str, ...], as_json: bool) -> None:
    """Show the runs in each FOLDER (runs/, if left out), those that something happened to last first.

    A FOLDER is a run folder, or holds some, in folders of its own too. Where recipes differ, the table has the keys in
    which they do; below it stands why a run failed.
    """
    from lockstep.reporting.overview import differing, overview
    from lockstep.run.runs import run_folders

    found = [_found(folder) for each in folders or ("runs",) for folder in run_folders(Path(each))]
    found.sort(key=lambda each: each.time, reverse=True)
    queue, unheard = _queue({each.submitted.job for each in found if each.submitted})
    runs = [_run(each, queue) for each in found]
    if as_json:
        keys = differing(runs)
        click.echo(json.dumps([_as_json(each, run, keys) for each, run in zip(found, runs, strict=True)], indent=1))
    elif runs:
        overview(runs, time.time(), sys.stdout)
    else:
        click.echo(f"no runs in {', '.join(folders) or 'runs'}")
    for line in [*(each.problem for each in found if each.problem), *([unheard] if unheard else [])]:
        click.echo(printable_line(f"warning: {line}"), err=True)


def _found(folder: Path) -> _Found:
    from lockstep.config.recorded import recorded_recipe
    from lockstep.reporting import jsonl
    from lockstep.reporting.status import Status, status
    from lockstep.run.runs import CONFIG, failure, is_held
    from lockstep.run.submitted import recorded

    said, submitted, problem = Status(), None, None
    log = folder / jsonl.EVENTS
    try:
        submitted = recorded(folder)
        said = status(jsonl.read(log) if os.path.lexists(log) else ())
    except UsageError as error:
        problem = str(error)
    except (KeyError, ValueError) as error:
        problem = f"{log}: not a log of this version ({error!r})"
    return _Found(folder, said, is_held(folder), submitted, problem, recorded_recipe(folder / CONFIG), failure(folder))


def _queue(jobs: Collection[int]) -> tuple[Mapping[int, tuple[str, str]] | None, str | None]:
    """Return what Slurm says of jobs, None where there is nothing to ask or nobody, and why nobody answered."""
    if not jobs or shutil.which("squeue") is None:
        return None, None
    from lockstep.launchers.slurm import states

    # Each number twice: of a single job that it does not know any more squeue makes an error, of several it does not.
    line = ["squeue", "--noheader", "--format=%i|%T|%r", f"--jobs={','.join(map(str, 2 * sorted(jobs)))}"]
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=_PATIENCE_S)
    except subprocess.TimeoutExpired:
        return None, f"squeue did not answer within {_PATIENCE_S:.0f} s: what follows from Slurm's queue is left out"
    if done.returncode:
        said = done.stderr.strip() or f"exit code {done.returncode}"
        return None, f"squeue failed: what follows from Slurm's queue is left out: {said}"
    return states(done.stdout), None


def _run(found: _Found, queue: Mapping[int, tuple[str, str]] | None) -> Run:
    from lockstep.reporting.overview import Run
    from lockstep.reporting.status import state

    submitted = found.submitted
    job, reason = (None, "") if queue is None or submitted is None else queue.get(submitted.job, ("", ""))
    judged = state(found.status, found.held, submitted.time if submitted else None, job)
    words = [str(submitted.job) if submitted else "", job or "", f"({reason})" if reason else ""]
    return Run(
        str(found.folder),
        "unreadable" if found.problem else judged,
        found.status,
        " ".join(filter(None, words)),
        found.recipe,
        found.failure if judged == "died" else "",
    )


def _as_json(found: _Found, run: Run, keys: Collection[str]) -> dict[str, object]:
    figure = run.status.figure
    figures = asdict(replace(run.status, figure=None)) | ({} if figure is None else {figure.name: figure.value})
    del figures["figure"]
    if run.status.loss is not None and not abs(run.status.loss) < float("inf"):
        figures["loss"] = str(run.status.loss)  # as in the log: JSON has no NaN and no infinity
    job = found.submitted.job if found.submitted else None
    return {
        "run": run.folder,
        "state": run.state,
        **figures,
        "job": job,
        "slurm": run.job.partition(" ")[2] or None,
        "failure": run.failure or None,
        "differs": {key: run.recipe.get(key) for key in keys},
    }
