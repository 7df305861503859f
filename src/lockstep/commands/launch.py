"""Start a run by a launcher: prints or runs the right line for torchrun, srun, mpirun or ssh."""

import os
import sys
from pathlib import Path
from typing import Final

import click

from lockstep.commands._script import ScriptCommand
from lockstep.common.names import choices
from lockstep.errors import UsageError
from lockstep.jobs.launch import number_of_hosts, read_hosts, start, starters
from lockstep.launchers import node
from lockstep.launchers.job import PORT, RESTARTS, Job, Resources, with_python

# Launchers of which `--on` has no need, each with the way it is used.
_ELSEWHERE: Final = {
    "ray": "Ray starts its own workers: call lockstep.ray.train, or lockstep.join in train_loop_per_worker",
    "kubernetes": "use lockstep submit --on kubernetes; or --on node, if the platform starts a pod for each node",
    "mpirun": "use --on openmpi",
    "srun": "use --on slurm",
}


def _launcher(_context: click.Context, _option: click.Parameter, name: str) -> str:
    """Return the name of a launcher; refuse any other with those there are, or with the way that it is used."""
    if name not in starters():
        raise click.BadParameter(_ELSEWHERE.get(name) or f"no launcher {name!r}{choices(name, list(starters()))}")
    return name


@click.command("launch", cls=ScriptCommand)
@click.option(
    "--on",
    metavar=f"[{'|'.join(starters())}]",
    callback=_launcher,
    default="local",
    show_default=True,
    help="Launcher to use.",
)
@click.option(
    "--nodes",
    metavar="NUMBER | MIN:MAX",
    help="Number of hosts; left out, 1 or as many as --hosts names. MIN:MAX: hosts may go and come (torchrun, ssh).",
)
@click.option(
    "--processes-per-node",
    type=click.IntRange(1),
    help="On each host; left out, one for each of --gpus-per-node, or 1.",
)
@click.option("--hosts", type=click.Path(path_type=Path), help="A file with the name of one host on each line.")
@click.option("--node-rank", type=click.IntRange(0), help="Number of this host, for torchrun on several.")
@click.option(
    "--port", type=click.IntRange(1, 65535), help=f"Where rank 0 listens on the first of --hosts; left out, {PORT}."
)
@click.option(
    "--restarts",
    type=click.IntRange(0),
    help=f"How often all start again, from the last checkpoint, after one failed (torchrun, ssh); left out, 0, or "
    f"{RESTARTS} where hosts may go and come, which can use up one each time.",
)
@click.option(
    "--rendezvous",
    type=click.Choice(["static", "c10d", "etcd-v2"]),
    help="Rendezvous of torchrun's agents; left out, static, or c10d where hosts may go and come.",
)
@click.option("--endpoint", default="", metavar="HOST:PORT", help="Where they meet; left out, the first host's --port.")
@click.option("--id", "name", default="", help="Rendezvous id (random for ssh).")
@click.option("--gpus-per-node", default="", metavar="[TYPE:]NUMBER", help="GPUs of each host (slurm).")
@click.option("--cpus-per-task", type=click.IntRange(1), help="Cores of each process (slurm).")
@click.option("--partition", default="", help="The partition to run in (slurm).")
@click.option("--account", default="", help="The account that it counts for (slurm).")
@click.option("--option", "options", multiple=True, metavar="WORD", help="Goes to the launcher as it is; repeatable.")
@click.option("--python", default=sys.executable, help="The Python on the hosts; left out, the path of this one.")
@click.option("--dry-run", is_flag=True, help="Print the line and do nothing.")
@click.argument("words", nargs=-1, metavar="-- COMMAND [ARGUMENT]...")
def command(
    on: str,
    nodes: str | None,
    processes_per_node: int | None,
    hosts: Path | None,
    node_rank: int | None,
    port: int | None,
    restarts: int | None,
    rendezvous: str | None,
    endpoint: str,
    name: str,
    gpus_per_node: str,
    cpus_per_task: int | None,
    partition: str,
    account: str,
    options: tuple[str, ...],
    python: str,
    dry_run: bool,
    words: tuple[str, ...],
) -> None:
    """Start `lockstep COMMAND`, such as train RECIPE, or a SCRIPT.py, by a launcher, in the foreground.

    lockstep launch --on slurm --nodes 2 --processes-per-node 4 -- train imagenet-resnet50 run.dir=runs/a
    """
    named = read_hosts(hosts) if hosts else ()
    fewest, count = number_of_hosts(nodes) if nodes else (None, len(named) or 1)
    resources = Resources(partition, account, gpus_per_node, cpus_per_task or 0)
    job = Job(
        with_python(words),
        python,
        count,
        resources.processes_per_node(processes_per_node),
        named,
        port or PORT,
        options,
        host=node_rank or 0,
        fewest=fewest,
        restarts=(RESTARTS if fewest else 0) if restarts is None else restarts,
        rendezvous=rendezvous or "",
        endpoint=endpoint,
        id=name,
        resources=resources,
        folder=str(Path.cwd()),
    )
    if on == node.LAUNCHER.name:
        told = {"--nodes": nodes, "--hosts": hosts, "--node-rank": node_rank}
        if given := [option for option, value in told.items() if value is not None]:
            raise UsageError(f"{', '.join(given)}: not with --on node, which reads the platform's variables; leave out")
        job = node.node_job(job, os.environ, processes_per_node)
        on, port, node_rank = (on, port, job.host) if job.nodes > 1 else ("local", None, None)
    raise SystemExit(start(on, job, port, node_rank, dry_run))
