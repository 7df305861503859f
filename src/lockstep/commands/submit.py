"""Give a run to Slurm's queue: writes a batch script that saves before the time is over and goes on by itself."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lockstep.errors import LockstepError, UsageError
from lockstep.launchers import slurm
from lockstep.launchers.job import Job, Resources, other_processes
from lockstep.run.submitted import SCRIPT, Submitted, record
from lockstep.training.checkpoint import durable

if TYPE_CHECKING:
    from lockstep.config.load import Loaded


@click.command("submit")
@click.option("--nodes", type=click.IntRange(1), default=1, show_default=True, help="Number of hosts.")
@click.option("--processes-per-node", type=click.IntRange(1), default=1, show_default=True, help="On each host.")
@click.option("--time", "limit", default="", help="Such as 04:00:00, or 1-12 (days-hours); left out, the partition's.")
@click.option(
    "--warn-before", type=int, default=120, show_default=True, help="Seconds before that, to save in; at most 65535."
)
@click.option("--gpus-per-node", default="", metavar="[TYPE:]NUMBER", help="GPUs of each host.")
@click.option("--cpus-per-task", type=click.IntRange(1), help="Cores of each process.")
@click.option("--partition", default="", help="The partition to run in; left out, the site's.")
@click.option("--account", default="", help="The account that it counts for; left out, your own.")
@click.option("--name", help="Of the job; left out, the recipe's.")
@click.option("--option", "options", multiple=True, metavar="WORD", help="Goes to sbatch as it is; repeatable.")
@click.option("--python", default=sys.executable, help="The Python on the hosts; left out, the path of this one.")
@click.option("--dry-run", is_flag=True, help="Print the script and do nothing.")
@click.argument("words", nargs=-1, metavar="-- train [RECIPE] [KEY=VALUE]...")
def command(
    nodes: int,
    processes_per_node: int,
    limit: str,
    warn_before: int,
    gpus_per_node: str,
    cpus_per_task: int | None,
    partition: str,
    account: str,
    name: str | None,
    options: tuple[str, ...],
    python: str,
    dry_run: bool,
    words: tuple[str, ...],
) -> None:
    """Submit `lockstep train` to Slurm as a job that goes on by itself until the run is done.

    lockstep submit --nodes 2 --processes-per-node 4 --time 04:00:00 -- train imagenet-resnet50 recipe.epochs=90
    """
    loaded = _checked(words, nodes * processes_per_node)
    run = _run(loaded)
    job = Job(
        _whole(words, loaded, run, nodes * processes_per_node),
        python,
        nodes,
        processes_per_node,
        options=options,
        resources=Resources(partition, account, gpus_per_node, cpus_per_task or 0),
    )
    again = () if loaded.config.run.resume == "auto" else ("run.resume=auto",)
    batch = slurm.Batch(job, name or loaded.name, str(Path.cwd()), str(run), limit, warn_before, again)
    text = slurm.script(slurm.checked(batch))
    if dry_run:
        click.echo(text, nl=False)
    else:
        _submit(run, text)


def _checked(words: tuple[str, ...], processes: int) -> Loaded:
    """Return the configuration, if `lockstep train` with so many processes would refuse nothing but the data."""
    if not words or words[0] != "train":
        raise UsageError(
            f"submit: expected -- train [RECIPE] [KEY=VALUE]..., got {shlex.join(words) or 'nothing'}; only training "
            f"can stop and go on. For other commands: lockstep launch --on slurm"
        )
    from lockstep.config.blame import with_places
    from lockstep.config.load import load, split
    from lockstep.run.continued import continued

    loaded = continued(load(*split(words[1:])))
    if problems := other_processes(loaded.config.placement.processes, processes):
        raise UsageError(*problems)
    from lockstep.run import folder as run_folder
    from lockstep.run.checks import check_placement
    from lockstep.run.resolved import resolve

    with with_places(loaded):
        check_placement(resolve(loaded, processes))
    run = loaded.config.run.dir
    if run and Path(run).exists():
        run_folder.claim(loaded).lock.release()  # refused here where it would be refused there
    return loaded


def _run(loaded: Loaded) -> Path:
    """Return the run folder, which each start of the job is to go on in."""
    from lockstep.run import folder as run_folder

    return Path(loaded.config.run.dir) if loaded.config.run.dir else run_folder.fresh(loaded)


def _whole(words: tuple[str, ...], loaded: Loaded, run: Path, processes: int) -> tuple[str, ...]:
    """Return the words of the run with all that must not change from one start to the next."""
    folder = () if loaded.config.run.dir else (f"run.dir={run}",)
    fixed = () if loaded.config.placement.processes != "auto" else (f"placement.processes={processes}",)
    return (*words, *folder, *fixed)


def _submit(run: Path, text: str) -> None:
    """Write the script into the run folder, submit it and say what became of it."""
    if shutil.which("sbatch") is None:
        raise UsageError("sbatch is not found: submit from a host of the cluster, or load Slurm's module")
    made = [each for each in (run, run / "logs") if not each.exists()]
    file = run / SCRIPT
    try:
        (run / "logs").mkdir(parents=True, exist_ok=True)  # Slurm does not make it, and would run a job without a log
        durable.replace(file, text.encode())
        file.chmod(0o755)
    except OSError as error:
        raise UsageError(f"run.dir {run}: cannot be used: {error.strerror}; choose another run.dir") from error
    submitted = time.time()
    try:
        job = _number(file)
    except LockstepError:
        if run in made:  # nothing is lost: --dry-run shows the script
            file.unlink()
        for folder in reversed(made):
            with suppress(OSError):
                folder.rmdir()
        raise
    record(run, Submitted(job, submitted))
    click.echo(
        f"job {job} submitted: {file}\nlogs: {run}/logs, from Slurm slurm-{job}.log\nhow it is: lockstep jobs {run}"
    )


def _number(file: Path) -> int:
    """Submit a script and return the number of its job."""
    done = subprocess.run(["sbatch", "--parsable", str(file)], capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr or done.stdout).strip() or "nothing"
        raise LockstepError(
            f"sbatch failed with exit code {done.returncode}, and the job is not submitted; it said:\n{said}"
        )
    number = done.stdout.strip().rpartition("\n")[2].partition(";")[0]  # after it, perhaps, the name of a cluster
    if not number.isdecimal():
        raise LockstepError(f"sbatch: expected the number of the job, got {done.stdout!r}; see what squeue --me says")
    return int(number)
