"""Start a run by a launcher: prints or runs the right line for torchrun, srun, mpirun or ssh."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import click

from lockstep.core.job import Job, checked
from lockstep.errors import UsageError
from lockstep.launchers import local, openmpi, slurm, ssh, torchrun


@click.command("launch")
@click.option(
    "--on", type=click.Choice(["local", "torchrun", "slurm", "openmpi", "ssh"]), required=True, help="Who starts it."
)
@click.option("--nodes", type=click.IntRange(1), help="Number of hosts; left out, 1 or as many as --hosts names.")
@click.option("--processes-per-node", type=click.IntRange(1), default=1, show_default=True, help="On each host.")
@click.option("--hosts", type=click.Path(path_type=Path), help="A file with the name of one host on each line.")
@click.option("--node-rank", type=click.IntRange(0), help="Number of this host, for torchrun on several.")
@click.option("--port", type=click.IntRange(1, 65535), default=29513, show_default=True, help="Where rank 0 listens.")
@click.option("--option", "options", multiple=True, metavar="WORD", help="Goes to the launcher as it is; repeatable.")
@click.option("--python", default=sys.executable, help="The Python on the hosts; left out, the path of this one.")
@click.option("--dry-run", is_flag=True, help="Print the line and do nothing.")
@click.argument("words", nargs=-1, metavar="-- COMMAND [ARGUMENT]...")
def command(
    on: str,
    nodes: int | None,
    processes_per_node: int,
    hosts: Path | None,
    node_rank: int | None,
    port: int,
    options: tuple[str, ...],
    python: str,
    dry_run: bool,
    words: tuple[str, ...],
) -> None:
    """Start `lockstep COMMAND`, such as train RECIPE, by a launcher, in the foreground.

    lockstep launch --on slurm --nodes 2 --processes-per-node 4 -- train imagenet-resnet50 run.dir=runs/a
    """
    named = _hosts(hosts) if hosts else ()
    count = nodes or len(named) or 1
    job = checked(Job(words, python, count, processes_per_node, named, port, options, node_rank or 0))
    _check_node_rank(on, job, node_rank)
    lines = _lines(on, job)
    if dry_run:
        for line in lines.values():
            click.echo(shlex.join(line))
    elif on == "ssh":
        raise SystemExit(_on_hosts(lines))
    else:
        _become(lines[""])


def _hosts(file: Path) -> tuple[str, ...]:
    """Return the names in a file: one on each line, # begins a remark, and what follows the name is not for us."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UsageError(f"--hosts {file}: {error.strerror}") from error
    names = tuple(line.split()[0] for line in lines if line.strip() and not line.lstrip().startswith("#"))
    if not names:
        raise UsageError(f"--hosts {file}: names no host; write one on each line")
    return names


def _check_node_rank(on: str, job: Job, node_rank: int | None) -> None:
    several = on == "torchrun" and job.nodes > 1
    if node_rank is not None and not (several and node_rank < job.nodes):
        raise UsageError(
            f"--node-rank: {node_rank} with --on {on} and {job.nodes} hosts; it is for torchrun on several"
        )
    if several and node_rank is None:
        raise UsageError(
            "--on torchrun: starts the processes of one host of several: say which in --node-rank, "
            "or use --on ssh, which does that"
        )


def _lines(on: str, job: Job) -> dict[str, list[str]]:
    """Return the lines to run, by the names of their hosts; the name is empty where one line starts all."""
    if on != "ssh":
        commands: Mapping[str, Callable[[Job], list[str]]] = {
            "local": local.command,
            "torchrun": torchrun.command,
            "slurm": slurm.command,
            "openmpi": openmpi.command,
        }
        return {"": commands[on](job)}
    if not job.hosts:
        raise UsageError("--on ssh: nobody says on which hosts; name them in --hosts FILE, one on each line")
    each = [replace(job, host=number) for number in range(job.nodes)]
    plain = [torchrun.command(replace(one, options=())) for one in each]
    return {one.hosts[one.host]: ssh.command(one, line, str(Path.cwd())) for one, line in zip(each, plain, strict=True)}


def _become(line: list[str]) -> None:
    """Become the launcher, so that signals go where they should."""
    if shutil.which(line[0]) is None:
        raise UsageError(f"{line[0]} is not found; install it or load its module, or choose another --on")
    sys.stdout.flush()
    os.execvp(line[0], line)


def _on_hosts(lines: Mapping[str, list[str]]) -> int:
    from lockstep.runtime.hosts import run_on_hosts

    if shutil.which("ssh") is None:
        raise UsageError("ssh is not found; install it, or choose another --on")
    ended = run_on_hosts(lines, lambda text: click.echo(text, err=True))
    return ended.code
