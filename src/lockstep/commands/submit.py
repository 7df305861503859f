"""Submit a run to Slurm or Kubernetes, as a job that saves when it is stopped, and resumes automatically."""

import sys

import click

from lockstep.commands._script import ScriptCommand
from lockstep.errors import UsageError
from lockstep.launchers.job import RESTARTS, Job, Resources, insert_python
from lockstep.launchers.kubernetes import KINDS, Cluster


@click.command("submit", cls=ScriptCommand)
@click.option("--on", type=click.Choice(["slurm", "kubernetes"]), default="slurm", show_default=True, help="Cluster.")
@click.option("--nodes", type=click.IntRange(1), default=1, show_default=True, help="Number of hosts.")
@click.option(
    "--processes-per-node",
    type=click.IntRange(1),
    help="Processes on each host. Defaults to --gpus-per-node, or to 1.",
)
@click.option(
    "--time",
    "limit",
    default="",
    help="Time limit, such as 04:00:00 or 1-12 (days-hours). Defaults to the limit of the partition (slurm).",
)
@click.option(
    "--warn-before",
    type=int,
    default=120,
    show_default=True,
    help="Seconds that a run gets to save before its job or node is stopped.",
)
@click.option("--gpus-per-node", default="", metavar="[TYPE:]NUMBER", help="GPUs of each host.")
@click.option("--cpus-per-task", type=click.IntRange(1), help="Cores of each process.")
@click.option(
    "--partition", default="", help="The partition to run in. Defaults to the site's default partition (slurm)."
)
@click.option("--account", default="", help="The account to charge. Defaults to your own (slurm).")
@click.option("--name", help="Name of the job. Defaults to the name of the recipe or script.")
@click.option("--option", "options", multiple=True, metavar="WORD", help="Passed to sbatch. Can be repeated (slurm).")
@click.option(
    "--python", help="Python on the hosts. Defaults to the path of this Python (slurm), or to python3 (kubernetes)."
)
@click.option("--kind", type=click.Choice(KINDS), help=f"Kind of the object. Defaults to {KINDS[0]} (kubernetes).")
@click.option("--image", default="", help="A container image with Lockstep (kubernetes).")
@click.option("--claim", default="", metavar="NAME:/PATH", help="Volume claim for shared files (kubernetes).")
@click.option("--queue", default="", help="A Kueue queue (kubernetes).")
@click.option("--namespace", default="", help="Defaults to the namespace of kubectl (kubernetes).")
@click.option(
    "--restarts", type=click.IntRange(0), help=f"Restarts after failures. Defaults to {RESTARTS} (kubernetes)."
)
@click.option("--dry-run", is_flag=True, help="Print the script or the manifest and do nothing.")
@click.argument("arguments", nargs=-1, metavar="-- train [RECIPE] [KEY=VALUE]... | SCRIPT.py")
def command(
    on: str,
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
    python: str | None,
    kind: str | None,
    image: str,
    claim: str,
    queue: str,
    namespace: str,
    restarts: int | None,
    dry_run: bool,
    arguments: tuple[str, ...],
) -> None:
    """Submit `lockstep train`, or on Kubernetes a SCRIPT.py, as a job that resumes automatically until it is complete.

    lockstep submit --nodes 2 --processes-per-node 4 --time 04:00:00 -- train imagenet-resnet50 recipe.epochs=90

    lockstep submit --on kubernetes --image IMAGE --claim runs:/runs -- train imagenet-resnet50 run.dir=/runs/a
    """
    from lockstep.jobs.submit import create_objects, make_batch_script, make_manifest, submit
    from lockstep.runs.runs import JOB_SCRIPT

    unsupported: dict[str, object] = {
        "--time": limit,
        "--partition": partition,
        "--account": account,
        "--option": options,
    }
    if on == "slurm":
        unsupported = {"--kind": kind, "--image": image, "--claim": claim, "--queue": queue, "--namespace": namespace}
        unsupported["--restarts"] = restarts
    if rejected := [option for option, value in unsupported.items() if value not in (None, "", ())]:
        names = ", ".join(rejected)
        raise UsageError(f"{names}: not supported with --on {on}; remove {names}")
    resources = Resources(partition, account, gpus_per_node, cpus_per_task or 0)
    per_node = resources.processes_per_node(processes_per_node)
    python = python or (sys.executable if on == "slurm" else "python3")
    job = Job(insert_python(arguments), python, nodes, per_node, options=options, resources=resources)
    if on == "kubernetes":
        volume, _, mount = claim.partition(":")
        cluster = Cluster(
            name or "",
            image,
            volume,
            mount,
            kind=kind or KINDS[0],
            restarts=RESTARTS if restarts is None else restarts,
            grace_s=warn_before,
            queue=queue,
            namespace=namespace,
        )
        objects = make_manifest(job, cluster)
        output = (
            objects if dry_run else "".join(f"created {created}\n" for created in create_objects(objects, namespace))
        )
        click.echo(output, nl=False)
        return
    run, script = make_batch_script(job, name, limit, warn_before)
    if dry_run:
        click.echo(script, nl=False)
        return
    number = submit(run, script)
    click.echo(f"job {number} submitted: {run / JOB_SCRIPT}")
    click.echo(f"logs: {run}/logs, from Slurm slurm-{number}.log\nstatus: lockstep jobs {run}")
