"""Implements `lockstep submit`: checks the training, builds the batch script or the manifest, and submits it."""

import re
import shlex
import shutil
import subprocess
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from lockstep.common.location import refuse_url
from lockstep.config.load import Loaded, load, split
from lockstep.errors import LockstepError, UsageError, os_error_as
from lockstep.launchers import batch, kubernetes
from lockstep.launchers.job import Job, check_job, other_processes
from lockstep.ranks.secret import new_secret
from lockstep.runs.runs import JOB_SCRIPT, Submitted, record_job
from lockstep.training.checkpoint import durable


def batch_script(job: Job, name: str | None, limit: str, warn_before_s: int) -> tuple[Path, str]:
    """Return the run folder and the batch script of a training job. Raise UsageError if the job can't run.

    `name` is the name of the job, which defaults to the name of the recipe. `limit` and `warn_before_s` are the fields
    `time` and `warn_before_s` of Batch.
    """
    loaded = _check_training(job)
    from lockstep.setup import recipe_folder

    refuse_url(loaded.config.run.dir, "submit --on slurm")
    run = Path(loaded.config.run.dir) if loaded.config.run.dir else recipe_folder.new_run_folder(loaded)
    # Set everything explicitly that could change when the job is started again.
    folder = () if loaded.config.run.dir else (f"run.dir={run}",)
    fixed = () if loaded.config.placement.processes != "auto" else (f"placement.processes={job.processes}",)
    resume = () if loaded.config.run.resume == "auto" else ("run.resume=auto",)
    resolved_job = replace(job, words=(*job.words, *folder, *fixed))
    request = batch.Batch(resolved_job, name or loaded.name, str(Path.cwd()), str(run), limit, warn_before_s, resume)
    return run, batch.script(batch.check_batch(request))


def submit(run: Path, script: str) -> int:
    """Write the batch script into the run folder and submit it. Record the job ID and return it."""
    if shutil.which("sbatch") is None:
        raise UsageError("sbatch not found; submit from a host of the cluster, or load Slurm's module")
    new_folders = [folder for folder in (run, run / "logs") if not folder.exists()]
    file = run / JOB_SCRIPT
    with os_error_as(UsageError, f"run.dir {run}: cannot be used", "; use a different run.dir"):
        (run / "logs").mkdir(parents=True, exist_ok=True)  # otherwise, Slurm runs the job without a log
        durable.replace(file, script.encode())
        file.chmod(0o755)
    submitted = time.time()
    try:
        job = batch.submit(file)
    except LockstepError:
        if run in new_folders:  # nothing is lost, because --dry-run shows the script
            file.unlink()
        for folder in reversed(new_folders):
            with suppress(OSError):
                folder.rmdir()
        raise
    record_job(run, Submitted(job, submitted))
    return job


def manifest(job: Job, cluster: kubernetes.Cluster) -> str:
    """Return the Kubernetes objects of a training job as YAML. Raise UsageError if the job can't run.

    The objects contain a new secret. Their name defaults to the name of the recipe or script.
    """
    if job.is_script:
        name, run = Path(job.words[1]).stem, None
    else:
        loaded = _check_training(job)
        name, run = loaded.name, loaded.config.run.dir or ""
        if loaded.config.run.resume != "auto":
            raise UsageError(
                f"run.resume: got {loaded.config.run.resume}, but each start resumes the run; remove run.resume"
            )
    name = cluster.name or re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")
    cluster = replace(cluster, name=name, secret=new_secret())
    kubernetes.check_cluster(check_job(job), cluster, run)
    return kubernetes.manifest(job, cluster)


def create(objects: str, namespace: str) -> list[str]:
    """Create all objects of a manifest, and return their names. If an object fails, all objects are deleted."""
    if shutil.which("kubectl") is None:
        raise UsageError("kubectl not found; install it, or create the output of --dry-run on a host that has kubectl")
    options = ["--namespace", namespace] if namespace else []
    line = ["kubectl", "create", *options, "--output", "name", "--filename", "-"]
    completed = subprocess.run(line, input=objects, capture_output=True, text=True)
    names = completed.stdout.split()
    if completed.returncode:
        if names:
            subprocess.run(["kubectl", "delete", *options, *names], capture_output=True)
        raise LockstepError(
            f"kubectl failed with exit code {completed.returncode}; it printed:\n{completed.stderr.strip()}"
        )
    return names


def _check_training(job: Job) -> Loaded:
    """Return the configuration of a training job.

    Raises UsageError for everything that `lockstep train` would reject with this number of processes, except for
    problems with the data.
    """
    if not job.words or job.words[0] != "train":
        raise UsageError(
            f"submit: expected -- train [RECIPE] [KEY=VALUE]..., got {shlex.join(job.words) or 'nothing'}; for a "
            "script, write a batch script (docs/launchers.md); for other commands, use lockstep launch"
        )
    loaded = load(*split(job.words[1:]))
    if problems := other_processes(loaded.config.placement.processes, job.processes):
        raise UsageError(*problems)
    # Imported lazily, because torch takes seconds.
    from lockstep.setup import recipe_folder
    from lockstep.setup.prepare import check

    check(loaded, job.processes)
    run = loaded.config.run.dir
    if run and Path(run).exists():
        recipe_folder.claim(loaded).lock.release()  # rejects a folder that the job would reject
    return loaded
