"""Give a run to Slurm's queue: a batch script that saves before the time is over and goes on by itself."""

import sys

import click

from lockstep.launchers.job import Job, Resources


@click.command("submit")
@click.option("--nodes", type=click.IntRange(1), default=1, show_default=True, help="Number of hosts.")
@click.option(
    "--processes-per-node",
    type=click.IntRange(1),
    help="On each host; left out, one for each of --gpus-per-node, or 1.",
)
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
    processes_per_node: int | None,
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
    from lockstep.jobs.submit import batch_script, submit
    from lockstep.run.runs import JOB_SCRIPT

    resources = Resources(partition, account, gpus_per_node, cpus_per_task or 0)
    each = resources.processes_per_node(processes_per_node)
    job = Job(words, python, nodes, each, options=options, resources=resources)
    run, script = batch_script(job, name, limit, warn_before)
    if dry_run:
        click.echo(script, nl=False)
        return
    number = submit(run, script)
    click.echo(f"job {number} submitted: {run / JOB_SCRIPT}")
    click.echo(f"logs: {run}/logs, from Slurm slurm-{number}.log\nhow it is: lockstep jobs {run}")
