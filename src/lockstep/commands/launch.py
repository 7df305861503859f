"""Start a run with a launcher: print or run the command line for torchrun, srun, mpirun or ssh."""

import os
import sys
from pathlib import Path
from typing import Final

import click

from lockstep.commands._script import ScriptCommand
from lockstep.common.names import format_choices
from lockstep.errors import UsageError
from lockstep.jobs.launch import find_startable_launchers, parse_host_count, read_hosts, start_job
from lockstep.launchers import node
from lockstep.launchers.job import PORT, RESTARTS, Job, Resources, insert_python

# Names that `--on` doesn't accept, each with an alternative.
_ALTERNATIVES: Final = {
    "ray": "Ray starts its own workers; call lockstep.ray.train, or lockstep.join in train_loop_per_worker",
    "kubernetes": "use lockstep submit --on kubernetes, or --on node if the platform starts a pod for each node",
    "mpirun": "use --on openmpi",
    "srun": "use --on slurm",
}


def _validate_launcher(_context: click.Context, _option: click.Parameter, name: str) -> str:
    """Return `name` if this launcher can be started. Otherwise, raise an error that suggests an alternative."""
    if name not in find_startable_launchers():
        raise click.BadParameter(
            _ALTERNATIVES.get(name) or f"no launcher {name!r}{format_choices(name, list(find_startable_launchers()))}"
        )
    return name


@click.command("launch", cls=ScriptCommand)
@click.option(
    "--on",
    metavar=f"[{'|'.join(find_startable_launchers())}]",
    callback=_validate_launcher,
    default="local",
    show_default=True,
    help="Launcher to use.",
)
@click.option(
    "--nodes",
    metavar="NUMBER | MIN:MAX",
    help="Number of hosts. Defaults to the number of --hosts, or to 1. With MIN:MAX, hosts can leave and join "
    "(torchrun, ssh).",
)
@click.option(
    "--processes-per-node",
    type=click.IntRange(1),
    help="Processes on each host. Defaults to --gpus-per-node, or to 1.",
)
@click.option("--hosts", type=click.Path(path_type=Path), help="A file with one host name per line.")
@click.option("--node-rank", type=click.IntRange(0), help="Index of this host, for torchrun on several hosts.")
@click.option(
    "--port", type=click.IntRange(1, 65535), help=f"Port of rank 0 on the first of --hosts. Defaults to {PORT}."
)
@click.option(
    "--restarts",
    type=click.IntRange(0),
    help=f"Number of restarts from the last checkpoint after a rank fails (torchrun, ssh). Defaults to 0, or to "
    f"{RESTARTS} with --nodes MIN:MAX, because a host that leaves or joins can use up a restart.",
)
@click.option(
    "--rendezvous",
    type=click.Choice(["static", "c10d", "etcd-v2"]),
    help="Rendezvous of torchrun's agents. Defaults to static, or to c10d with --nodes MIN:MAX.",
)
@click.option(
    "--endpoint", default="", metavar="HOST:PORT", help="Rendezvous address. Defaults to --port on the first host."
)
@click.option("--id", "name", default="", help="Rendezvous id (random for ssh).")
@click.option("--gpus-per-node", default="", metavar="[TYPE:]NUMBER", help="GPUs of each host (slurm).")
@click.option("--cpus-per-task", type=click.IntRange(1), help="Cores of each process (slurm).")
@click.option("--partition", default="", help="The partition to run in (slurm).")
@click.option("--account", default="", help="The account to charge (slurm).")
@click.option("--option", "options", multiple=True, metavar="WORD", help="Passed to the launcher. Can be repeated.")
@click.option("--python", default=sys.executable, help="Python on the hosts. Defaults to the path of this Python.")
@click.option("--dry-run", is_flag=True, help="Print the command line and do nothing.")
@click.argument("arguments", nargs=-1, metavar="-- COMMAND [ARGUMENT]...")
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
    arguments: tuple[str, ...],
) -> None:
    """Start `lockstep COMMAND`, such as train RECIPE, or a SCRIPT.py with a launcher, in the foreground.

    lockstep launch --on slurm --nodes 2 --processes-per-node 4 -- train imagenet-resnet50 run.dir=runs/a
    """
    host_names = read_hosts(hosts) if hosts else ()
    min_hosts, count = parse_host_count(nodes) if nodes else (None, len(host_names) or 1)
    resources = Resources(partition, account, gpus_per_node, cpus_per_task or 0)
    job = Job(
        insert_python(arguments),
        python,
        count,
        resources.processes_per_node(processes_per_node),
        host_names,
        port or PORT,
        options,
        host_index=node_rank or 0,
        min_nodes=min_hosts,
        restarts=(RESTARTS if min_hosts else 0) if restarts is None else restarts,
        rendezvous=rendezvous or "",
        endpoint=endpoint,
        id=name,
        resources=resources,
        folder=str(Path.cwd()),
    )
    if on == node.LAUNCHER.name:
        unsupported = {"--nodes": nodes, "--hosts": hosts, "--node-rank": node_rank}
        if rejected := [option for option, value in unsupported.items() if value is not None]:
            names = ", ".join(rejected)
            raise UsageError(
                f"{names}: not supported with --on node, which reads the variables of the platform; remove {names}"
            )
        job = node.make_node_job(job, os.environ, processes_per_node)
        on, port, node_rank = (on, port, job.host_index) if job.nodes > 1 else ("local", None, None)
    raise SystemExit(start_job(on, job, port, node_rank, dry_run))
