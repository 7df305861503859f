"""Training jobs in the Slurm queue: writes batch scripts, submits them, and reads job states from squeue."""

import re
import shlex
import shutil
import subprocess
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from lockstep.common.rank import SECRET
from lockstep.errors import LockstepError, UsageError
from lockstep.launchers.job import Job, Resources, find_resource_problems, load_template
from lockstep.launchers.slurm import command

_SCRIPT: Final = Path(__file__).with_name("batch.sh")
_MAX_WARNING_S: Final = 65_535  # limit in Slurm
_SQUEUE_TIMEOUT_S: Final = 5.0  # if Slurm's controller is overloaded, squeue can take minutes
_TIME: Final = re.compile(r"(?:(\d+)-(\d+)(?::(\d+)(?::(\d+))?)?|(?:(\d+):)?(\d+):(\d+)|(\d+))", re.ASCII)


@dataclass(frozen=True)
class BatchJob:
    """A training job for the Slurm queue. `run` is its run folder.

    The options of `job` are passed to sbatch. Relative paths are relative to `folder`. `time` is the time limit in
    Slurm's format, or empty for the default of the partition. Ranks receive a warning signal `warn_before_s` seconds
    before the limit. `restart_args` are extra arguments that are used if the folder already contains the run.
    """

    job: Job
    name: str
    folder: str
    run: str
    time: str
    warn_before_s: int
    restart_args: tuple[str, ...] = ()

    @property
    def log_path(self) -> str:
        """The absolute path of the job's log. Slurm replaces %j with the job ID. All other % signs are escaped."""
        folder = self.run if self.run.startswith("/") else f"{self.folder}/{self.run}"
        return f"{folder.replace('%', '%%')}/logs/slurm-%j.log"


def check_batch(batch: BatchJob) -> BatchJob:
    """Return the batch job unchanged. If Slurm can't run it, raise UsageError with all problems."""
    limit = _parse_time(batch.time) if batch.time else None
    problems = []
    if batch.time and limit is None:
        problems.append(f"--time: expected minutes, HH:MM:SS, D-HH or D-HH:MM:SS, got {batch.time}")
    if not 0 < batch.warn_before_s <= _MAX_WARNING_S:
        problems.append(f"--warn-before: expected 1 to {_MAX_WARNING_S} seconds, got {batch.warn_before_s}")
    elif limit is not None and batch.warn_before_s >= limit:
        problems.append(
            f"--warn-before: {batch.warn_before_s} s must be less than --time {batch.time}; reduce it, or raise --time"
        )
    problems += find_resource_problems(batch.job)
    texts = {"--name": batch.name, "run.dir": batch.run, "the current folder": batch.folder}
    texts |= batch.job.resources.named
    texts |= {f"--option {word!r}": word for word in batch.job.options}
    problems += [
        f"{name}: contains a line break, which a batch script does not support; remove it"
        for name in texts
        if "\n" in texts[name]
    ]
    if problems:
        raise UsageError("\n".join(problems))
    return batch


def render_script(batch: BatchJob) -> str:
    """Return the bash script of a batch job. Comments in the script explain it to users who find it in a run folder."""
    # A job step inherits the resources of the job, so srun must not request them again.
    call = shlex.join(command(replace(batch.job, options=(), resources=Resources())))
    words = {"quote": shlex.quote, "join": shlex.join, "call": call, "secret": SECRET}
    return load_template(_SCRIPT).render(batch=batch, job=batch.job, **words)


def submit(file: Path) -> int:
    """Submit a batch script and return the job ID."""
    result = subprocess.run(["sbatch", "--parsable", str(file)], capture_output=True, text=True)
    if result.returncode:
        output = (result.stderr or result.stdout).strip() or "nothing"
        raise LockstepError(
            f"sbatch failed with exit code {result.returncode}, and the job was not submitted; it printed:\n{output}"
        )
    job_id = result.stdout.strip().rpartition("\n")[2].partition(";")[0]  # the job ID may be followed by a cluster name
    if not job_id.isdecimal():
        raise LockstepError(f"sbatch: expected a job ID, got {result.stdout!r}; look for the job in squeue --me")
    return int(job_id)


def query_states(jobs: Collection[int]) -> tuple[Mapping[int, tuple[str, str]] | None, str]:
    """Query Slurm for jobs by ID. Return the state and reason of each known job, and a warning or an empty string.

    If `jobs` is empty, if squeue isn't installed, or if squeue fails, None is returned instead of the states. If squeue
    fails, the warning contains the reason.
    """
    if not jobs or shutil.which("squeue") is None:
        return None, ""
    # Pass each ID twice, because squeue fails for a single unknown job, but not for multiple jobs.
    line = ["squeue", "--noheader", "--format=%i|%T|%r", f"--jobs={','.join(map(str, 2 * sorted(jobs)))}"]
    try:
        result = subprocess.run(line, capture_output=True, text=True, timeout=_SQUEUE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return (
            None,
            f"squeue did not answer within {_SQUEUE_TIMEOUT_S:.0f} s: states from the queue of Slurm are omitted",
        )
    if result.returncode:
        cause = result.stderr.strip() or f"exit code {result.returncode}"
        return None, f"squeue failed: states from the queue of Slurm are omitted: {cause}"
    return parse_states(result.stdout), ""


def parse_states(text: str) -> dict[int, tuple[str, str]]:
    """Parse the output of `squeue --noheader --format=%i|%T|%r` into the state and reason of each job."""
    states_by_job = {}
    for line in text.splitlines():
        job_id, _, state_and_reason = line.strip().partition("|")
        state, _, reason = state_and_reason.partition("|")
        if job_id.isdecimal() and state:
            states_by_job[int(job_id)] = (state, "" if reason == "None" else reason)
    return states_by_job


def _parse_time(time: str) -> int | None:
    """Parse a Slurm time: minutes, minutes:seconds, hours:minutes:seconds or days-hours[:minutes[:seconds]]."""
    match = _TIME.fullmatch(time)
    if match is None:
        return None
    days, day_hours, day_minutes, day_seconds, hours, minutes, seconds, plain = (
        int(part or 0) for part in match.groups()
    )
    return days * 86_400 + (day_hours + hours) * 3_600 + (day_minutes + minutes + plain) * 60 + day_seconds + seconds
