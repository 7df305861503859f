"""`lockstep submit` below its options: what `lockstep train` would refuse, the batch script, and its submission."""

import shlex
import shutil
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from lockstep.config.blame import with_places
from lockstep.config.load import Loaded, load, split
from lockstep.errors import LockstepError, UsageError, os_error_as
from lockstep.launchers import batch
from lockstep.launchers.job import Job, other_processes
from lockstep.run.runs import JOB_SCRIPT, Submitted, record_job
from lockstep.training.checkpoint import durable


def batch_script(job: Job, name: str | None, limit: str, warn_before_s: int) -> tuple[Path, str]:
    """Return the run folder of a training and its batch script; UsageError for what cannot be.

    `name` is the job's, left out the recipe's; `limit` and `warn_before_s` are the `time` and `warn_before_s` of a
    batch.
    """
    loaded = _check_training(job)
    from lockstep.run import folder as run_folder

    run = Path(loaded.config.run.dir) if loaded.config.run.dir else run_folder.fresh(loaded)
    # Nothing may change from one start to the next.
    folder = () if loaded.config.run.dir else (f"run.dir={run}",)
    fixed = () if loaded.config.placement.processes != "auto" else (f"placement.processes={job.processes}",)
    again = () if loaded.config.run.resume == "auto" else ("run.resume=auto",)
    whole = replace(job, words=(*job.words, *folder, *fixed))
    asked = batch.Batch(whole, name or loaded.name, str(Path.cwd()), str(run), limit, warn_before_s, again)
    return run, batch.script(batch.check_batch(asked))


def submit(run: Path, script: str) -> int:
    """Write the batch script into the run folder, submit it and return the number of the job, which is recorded."""
    if shutil.which("sbatch") is None:
        raise UsageError("sbatch is not found: submit from a host of the cluster, or load Slurm's module")
    made = [each for each in (run, run / "logs") if not each.exists()]
    file = run / JOB_SCRIPT
    with os_error_as(UsageError, f"run.dir {run}: cannot be used", "; choose another run.dir"):
        (run / "logs").mkdir(parents=True, exist_ok=True)  # Slurm does not make it, and would run a job without a log
        durable.replace(file, script.encode())
        file.chmod(0o755)
    submitted = time.time()
    try:
        job = batch.submit(file)
    except LockstepError:
        if run in made:  # nothing is lost: --dry-run shows the script
            file.unlink()
        for folder in reversed(made):
            with suppress(OSError):
                folder.rmdir()
        raise
    record_job(run, Submitted(job, submitted))
    return job


def _check_training(job: Job) -> Loaded:
    """Return the configuration, if `lockstep train` with so many processes would refuse nothing but the data."""
    if not job.words or job.words[0] != "train":
        raise UsageError(
            f"submit: expected -- train [RECIPE] [KEY=VALUE]..., got {shlex.join(job.words) or 'nothing'}; only "
            f"training can stop and go on. For other commands: lockstep launch --on slurm"
        )
    loaded = load(*split(job.words[1:]))
    if problems := other_processes(loaded.config.placement.processes, job.processes):
        raise UsageError(*problems)
    # Only now: torch takes seconds.
    from lockstep.run import folder as run_folder
    from lockstep.run.checks import check_placement
    from lockstep.run.resolved import resolve

    with with_places(loaded):
        check_placement(resolve(loaded, job.processes))
    run = loaded.config.run.dir
    if run and Path(run).exists():
        run_folder.claim(loaded).lock.release()  # refused here where it would be refused there
    return loaded
