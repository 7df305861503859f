"""Implements `lockstep submit`: checks a training job, builds its batch script or manifest, and submits it."""

import re
import shlex
import shutil
import subprocess
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from lockstep.common.location import reject_url
from lockstep.config.load import LoadedConfig, load, split_arguments
from lockstep.errors import LockstepError, UsageError, convert_os_error
from lockstep.launchers import batch, kubernetes
from lockstep.launchers.job import Job, check_job, find_process_problems
from lockstep.ranks.secret import generate_secret
from lockstep.runs.runs import JOB_SCRIPT, SubmittedJob, record_job
from lockstep.training.checkpoint import durable


def make_batch_script(job: Job, name: str | None, time_limit: str, warn_before_s: int) -> tuple[Path, str]:
    """Check a training job, and return its run folder and its batch script. Raises UsageError if the job can't run.

    `name` is the name of the job, which defaults to the name of the recipe. `time_limit` is in Slurm's format. Ranks
    receive a warning signal `warn_before_s` seconds before the time limit.
    """
    loaded = _check_training(job)
    from lockstep.setup import recipe_folder

    reject_url(loaded.config.run.dir, "submit --on slurm")
    run = Path(loaded.config.run.dir) if loaded.config.run.dir else recipe_folder.make_run_folder_path(loaded)
    # Add overrides for all settings that could change when the job is started again.
    folder = () if loaded.config.run.dir else (f"run.dir={run}",)
    fixed = () if loaded.config.placement.processes != "auto" else (f"placement.processes={job.processes}",)
    resume = () if loaded.config.run.resume == "auto" else ("run.resume=auto",)
    resolved_job = replace(job, words=(*job.words, *folder, *fixed))
    request = batch.BatchJob(
        resolved_job, name or loaded.name, str(Path.cwd()), str(run), time_limit, warn_before_s, resume
    )
    return run, batch.render_script(batch.check_batch(request))


def submit(run: Path, script: str) -> int:
    """Write the batch script into the run folder and submit it. Return the job ID, and record it in the run folder."""
    if shutil.which("sbatch") is None:
        raise UsageError("sbatch not found; submit from a host of the cluster, or load Slurm's module")
    new_folders = [folder for folder in (run / "logs", run, *run.parents) if not folder.exists()]
    file = run / JOB_SCRIPT
    with convert_os_error(UsageError, f"run.dir {run}: cannot be used", "; use a different run.dir"):
        (run / "logs").mkdir(parents=True, exist_ok=True)  # otherwise, Slurm runs the job without a log
        durable.replace(file, script.encode())
        file.chmod(0o755)
    submit_time = time.time()
    try:
        job = batch.submit(file)
    except LockstepError:
        if run in new_folders:  # nothing is lost, because --dry-run shows the script
            file.unlink()
        for folder in new_folders:
            with suppress(OSError):
                folder.rmdir()
        raise
    record_job(run, SubmittedJob(job, submit_time))
    return job


def make_manifest(job: Job, cluster: kubernetes.Cluster) -> str:
    """Check a training job, and return its Kubernetes manifest as YAML. Raises UsageError if the job can't run.

    The manifest contains a new secret. The name of the objects defaults to the name of the recipe or script.
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
    cluster = replace(cluster, name=name, secret=generate_secret())
    kubernetes.check_cluster(check_job(job), cluster, run)
    return kubernetes.render_manifest(job, cluster)


def create_objects(manifest: str, namespace: str) -> list[str]:
    """Create the objects of a manifest, and return their names. If one can't be created, delete the others."""
    if shutil.which("kubectl") is None:
        raise UsageError(
            "kubectl not found; install it, or run `kubectl create -f` with the output of --dry-run on a host that "
            "has it"
        )
    options = ["--namespace", namespace] if namespace else []
    line = ["kubectl", "create", *options, "--output", "name", "--filename", "-"]
    completed = subprocess.run(line, input=manifest, capture_output=True, text=True)
    names = completed.stdout.split()
    if completed.returncode:
        if names:
            subprocess.run(["kubectl", "delete", *options, *names], capture_output=True)
        raise LockstepError(
            f"kubectl failed with exit code {completed.returncode}; it printed:\n{completed.stderr.strip()}"
        )
    return names


def _check_training(job: Job) -> LoadedConfig:
    """Check a training job, and return its configuration.

    Raises UsageError if `lockstep train` would reject the job with its number of processes. The data isn't checked.
    """
    if not job.words or job.words[0] != "train":
        command = job.words[1:] if job.is_script else job.words  # without the word `python`, which may be inserted
        raise UsageError(
            f"submit: expected -- train [RECIPE] [KEY=VALUE]..., got {shlex.join(command) or 'nothing'}; for a "
            "script, write a batch script (docs/launchers.md); for other commands, use lockstep launch"
        )
    loaded = load(*split_arguments(job.words[1:]))
    if problems := find_process_problems(loaded.config.placement.processes, job.processes):
        raise UsageError(*problems)
    # Imported lazily, because torch takes seconds.
    from lockstep.setup import recipe_folder
    from lockstep.setup.prepare import check_config

    check_config(loaded, job.processes)
    run = loaded.config.run.dir
    if run and Path(run).exists():
        recipe_folder.claim_run_folder(loaded).lock.release()  # rejects a folder that the job would reject
    return loaded
