"""Start a run by a launcher: prints or runs the right line for torchrun, srun, mpirun or ssh."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import sys
import uuid
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import click

from lockstep.core.rank import SECRET
from lockstep.errors import EXIT_INTERRUPTED, EXIT_SAVED, LockstepError, UsageError
from lockstep.launchers import local, openmpi, slurm, ssh, torchrun
from lockstep.launchers.job import PORT, Job, Resources, checked
from lockstep.ranks.secret import drawn, job_secret
from lockstep.tether import SRUN_PORT, held, problem_of

RESTARTS: Final = 10


@click.command("launch")
@click.option(
    "--on",
    type=click.Choice(["local", "torchrun", "slurm", "openmpi", "ssh"]),
    default="local",
    show_default=True,
    help="Who starts it.",
)
@click.option(
    "--nodes",
    metavar="NUMBER | MIN:MAX",
    help="Number of hosts; left out, 1 or as many as --hosts names. MIN:MAX: hosts may go and come (torchrun, ssh).",
)
@click.option("--processes-per-node", type=click.IntRange(1), default=1, show_default=True, help="On each host.")
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
    help="How torchrun's agents meet; left out, static, or c10d where hosts may go and come.",
)
@click.option("--endpoint", default="", metavar="HOST:PORT", help="Where they meet; left out, the first host's --port.")
@click.option("--id", "name", default="", help="Tells this rendezvous from others there; for --on ssh one is drawn.")
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
    processes_per_node: int,
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
    """Start `lockstep COMMAND`, such as train RECIPE, or `python SCRIPT`, by a launcher, in the foreground.

    lockstep launch --on slurm --nodes 2 --processes-per-node 4 -- train imagenet-resnet50 run.dir=runs/a
    """
    named = _hosts(hosts) if hosts else ()
    fewest, count = _nodes(nodes) if nodes else (None, len(named) or 1)
    job = Job(
        words,
        python,
        count,
        processes_per_node,
        named,
        port or PORT,
        options,
        host=node_rank or 0,
        fewest=fewest,
        restarts=(RESTARTS if fewest else 0) if restarts is None else restarts,
        rendezvous=rendezvous or "",
        endpoint=endpoint,
        id=name,
        resources=Resources(partition, account, gpus_per_node, cpus_per_task or 0),
    )
    _check_elastic(on, checked(job))
    _check_resources(on, job)
    _check_port(on, job, port)
    job = _with_id(on, job)
    _check_node_rank(on, job, node_rank)
    _check_restarts(job)
    secret = _secret(on, job)
    job = replace(job, signed=bool(secret))
    lines = _lines(on, job)
    if on == "local" and job.is_script and not dry_run:
        from lockstep.run.script import start_script

        raise SystemExit(start_script(job.words[1], job.words[2:], job.processes))
    if dry_run:
        for line in lines.values():
            click.echo(shlex.join(line))
    elif on == "ssh":
        raise SystemExit(_on_hosts(lines, job, secret))
    else:
        if on == "torchrun" and not job.standalone and (problem := problem_of(job.meets_on)):
            raise UsageError(problem)
        _become(lines[""], on, secret)


def _hosts(file: Path) -> tuple[str, ...]:
    """Return the names in a file: one on each line, # begins a remark, and what follows the name is not for us."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UsageError(f"--hosts {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--hosts {file}: is no text; write the name of one host on each line") from error
    names = tuple(line.split()[0] for line in lines if line.strip() and not line.lstrip().startswith("#"))
    if not names:
        raise UsageError(f"--hosts {file}: names no host; write one on each line")
    return names


def _nodes(text: str) -> tuple[int | None, int]:
    """Return the fewest hosts that will do, or None where all are needed, and the most."""
    numbers = text.split(":")
    if len(numbers) > 2 or not all(number.isdecimal() and int(number) for number in numbers):
        raise UsageError(f"--nodes: expected a number such as 2, or MIN:MAX such as 1:3, got {text}")
    return (int(numbers[0]) if len(numbers) == 2 else None), int(numbers[-1])


def _check_elastic(on: str, job: Job) -> None:
    if on not in ("torchrun", "ssh") and job.elastic:
        raise UsageError(f"{', '.join(job.elastic)}: not with --on {on}; the agents of --on torchrun and ssh do that")
    if job.id and (job.standalone or job.meets_by == "static"):
        raise UsageError(f"--id: {job.id}, but who meets statically or alone has no name for that; leave --id out")


def _check_resources(on: str, job: Job) -> None:
    asked = list(job.resources.named)
    if on != "slurm" and asked:
        raise UsageError(f"{', '.join(asked)}: not with --on {on}; they are for Slurm: --on slurm, or lockstep submit")


def _secret(on: str, job: Job) -> str:
    """Return the secret of the job: the user's own, else a new one where this command starts all ranks; "" for none.

    Hosts that join later, or that another command starts, would not have a new one.
    """
    own = os.fsdecode(job_secret(os.environ))
    starts_all = job.fewest is None and (on in ("slurm", "openmpi", "ssh") or (on == "torchrun" and job.nodes == 1))
    return own or (drawn() if starts_all else "")


def _check_port(on: str, job: Job, port: int | None) -> None:
    unused = "" if port is None else _unused_port(on, job)
    if unused:
        raise UsageError(f"--port: {port}, but with --on {on} {unused}; leave --port out")


def _unused_port(on: str, job: Job) -> str:
    """Return why the launcher has no use for --port, "" where it has."""
    if on == "local":
        return "the processes meet in files"
    if on == "slurm":
        return "it follows from the numbers of job and step, or is MASTER_PORT of the environment"
    if on == "openmpi":
        return "" if len(job.hosts) > 1 else "it follows from the number of the job, or is mpirun's -x MASTER_PORT=PORT"
    if job.endpoint:
        return f"they meet at --endpoint {job.endpoint}"
    return "a free one is looked for on one host" if job.standalone else ""


def _with_id(on: str, job: Job) -> Job:
    """Return the job with a name for its rendezvous, where it wants one and one line or one process knows all hosts."""
    if job.id or job.meets_by == "static":
        return job
    if on == "ssh" or job.nodes == 1:
        return replace(job, id=uuid.uuid4().hex[:12])
    if job.rendezvous == "etcd-v2":  # what etcd keeps of a rendezvous that has ended refuses another of its name
        raise UsageError("--rendezvous: etcd-v2 wants a name for this start, the same on all hosts; say it in --id")
    return job


def _check_node_rank(on: str, job: Job, node_rank: int | None) -> None:
    several = on == "torchrun" and job.nodes > 1 and job.meets_by == "static"
    if node_rank is not None and not (several and node_rank < job.nodes):
        raise UsageError(
            f"--node-rank: {node_rank} with --on {on} and {job.nodes} hosts; it is for torchrun on several "
            f"that meet statically"
        )
    if several and node_rank is None:
        raise UsageError(
            "--on torchrun: starts the processes of one host of several: say which in --node-rank, "
            "or use --on ssh, which does that"
        )


def _check_restarts(job: Job) -> None:
    """Raise UsageError where a training is to be started again that would not go on."""
    if (job.restarts or job.fewest) and job.words[0] == "train" and not _run_folder(job.words):
        raise UsageError(
            "run.dir: left out, but with --restarts or --nodes MIN:MAX the run may be started again, and each start "
            "would begin a run of its own; name one, such as run.dir=runs/a"
        )


def _run_folder(words: tuple[str, ...]) -> str | None:
    """Return the run folder that a training names, None where it names none; ConfigError where its words are wrong."""
    from lockstep.config.load import load, split

    return load(*split(words[1:])).config.run.dir


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
    each = [replace(job, host=number) for number in range(len(job.hosts))]
    plain = [torchrun.command(replace(one, options=())) for one in each]
    return {one.hosts[one.host]: ssh.command(one, line, str(Path.cwd())) for one, line in zip(each, plain, strict=True)}


def _become(line: list[str], on: str, secret: str) -> None:
    """Become the launcher, so that signals go where they should. What it starts has the secret in its environment."""
    env = {**os.environ, SECRET: secret} if secret else dict(os.environ)
    if shutil.which(line[0]) is None:
        raise UsageError(f"{line[0]} is not found; install it or load its module, or choose another --on")
    sys.stdout.flush()
    with held() if on == "slurm" else nullcontext() as tied_to:
        port = {SRUN_PORT: str(tied_to.getsockname()[1])} if tied_to else {}
        os.execvpe(line[0], line, env | port)


def _on_hosts(lines: Mapping[str, list[str]], job: Job, secret: str) -> int:
    """Run the lines and return the exit code: the first host's that failed, or what says that the run is saved.

    torchrun makes 1 of that; it is found in the run folder, where this host sees it too.
    """
    from lockstep.launchers.hosts import run_on_hosts

    if shutil.which("ssh") is None:
        raise UsageError("ssh is not found; install it, or choose another --on")
    before = _result(job)
    ended = run_on_hosts(lines, _say, needed=job.fewest, secret=secret)
    result = _result(job)
    if not ended.code or result == before or result.get("exit_code") not in (EXIT_SAVED, EXIT_INTERRUPTED):
        return ended.code
    return EXIT_INTERRUPTED if ended.asked == signal.SIGINT else EXIT_SAVED


def _say(text: str) -> None:
    with suppress(OSError):  # the terminal may be gone: SIGHUP says so
        click.echo(text, err=True)


def _result(job: Job) -> dict[str, Any]:
    """Return what a training left in its run folder; empty where it has not ended, or none is named or found."""
    from lockstep.run.runs import RESULT

    if job.words[0] != "train":
        return {}
    with suppress(LockstepError, OSError, ValueError):  # the ranks tell what is wrong with their words
        folder = _run_folder(job.words)
        found = json.loads(Path(folder, RESULT).read_bytes()) if folder else {}
        return found if isinstance(found, dict) else {}
    return {}
