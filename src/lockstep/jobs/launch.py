"""Starts a job with a launcher, by replacing this process with the launcher or by running a command for each host."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
import uuid
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lockstep.common.follow_parent import ADDRESS_ADVICE, SRUN_PORT, check_host_resolves, open_listening_socket
from lockstep.common.rank import SECRET
from lockstep.common.text import format_count, printable
from lockstep.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_SAVED, PERSISTENT_EXITS, LockstepError, UsageError
from lockstep.launchers import ORDER
from lockstep.launchers.base import Launcher
from lockstep.launchers.job import Job, check_job
from lockstep.ranks.secret import generate_secret, read_job_secret

if TYPE_CHECKING:
    from lockstep.config.load import LoadedConfig

_FIRST_NODE_TIMEOUT_S: Final = 600.0  # how long to wait until the name of the first node can be resolved


def find_startable_launchers() -> dict[str, Launcher]:
    """Return the launchers that can start a job, by name."""
    return {launcher.name: launcher for launcher in ORDER if launcher.command or launcher.commands}


def start_job(name: str, job: Job, port: int | None, node_rank: int | None, dry_run: bool) -> int:
    """Start a job with a launcher, and return its exit code. With `dry_run`, only print the commands.

    `port` and `node_rank` are None if the user didn't set them. Raises UsageError if the job can't be started.
    """
    launcher = find_startable_launchers()[name]
    job = _add_id(launcher, _check_launcher(launcher, job, port))
    _check_node_rank(launcher, job, node_rank)
    if (job.restarts or job.min_nodes) and job.words[0] == "train" and not _load_config(job).config.run.dir:
        raise UsageError(
            "run.dir: not set, but with --restarts or --nodes MIN:MAX the run can be restarted, and each start would "
            "begin a new run; set it, for example run.dir=runs/a"
        )
    if dry_run or name not in ("local", "node"):  # otherwise, the ranks on this host check the strategy
        _check_strategy(job)
    # Use the user's secret. If there is none, generate a secret, but only if this command starts all ranks, because all
    # ranks need it.
    user_secret = os.fsdecode(read_job_secret(os.environ))
    secret = user_secret or (
        generate_secret() if launcher.signed and launcher.starts_all(job) and job.min_nodes is None else ""
    )
    signed_job = replace(job, signed=bool(secret))
    command_lines = launcher.commands(signed_job) if launcher.commands else {}
    command_line = launcher.command(signed_job) if launcher.command else []
    if dry_run:
        print("\n".join(map(shlex.join, command_lines.values() or [command_line])))
        return EXIT_DONE
    if job.is_script:  # a script prints nothing until it has imported its libraries, which takes seconds
        script = " ".join(job.module[: 2 if job.module[0] == "-m" else 1])
        launched_by = "" if name == "local" else f" with {name}"
        _print_message(printable(f"starting {script} on {format_count(job.processes, 'process')}{launched_by}"))
    if name == "local" and job.is_script:
        from lockstep.loop.script import start_script

        return start_script(job.words[1], job.words[2:], job.processes)
    if job.first_address:
        _wait_for_host(job.first_address)
    if command_lines:
        return _run_on_hosts(launcher, command_lines, job, secret)
    if launcher.elastic and not job.standalone and (problem := check_host_resolves(job.rendezvous_host)):
        raise UsageError(f"{problem}; {ADDRESS_ADVICE}")
    _exec_launcher(command_line, launcher, secret)
    return EXIT_DONE


def read_hosts(file: Path) -> tuple[str, ...]:
    """Return the host names in a file, which contains one name per line.

    Lines that start with # are comments. Anything after the name is ignored.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UsageError(f"--hosts {file}: {error.strerror}; pass a file with one host name per line") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--hosts {file}: not a text file; write one host name per line") from error
    names = tuple(line.split()[0] for line in lines if line.strip() and not line.lstrip().startswith("#"))
    if not names:
        raise UsageError(f"--hosts {file}: contains no host name; write one host name per line")
    return names


def parse_host_count(text: str) -> tuple[int | None, int]:
    """Parse the value of --nodes.

    Return the minimum and maximum number of hosts, or None and N if all N are required.
    """
    numbers = text.split(":")
    if len(numbers) > 2 or not all(number.isdecimal() and int(number) for number in numbers):
        raise UsageError(f"--nodes: expected a number such as 2, or MIN:MAX such as 1:3, got {text}")
    return (int(numbers[0]) if len(numbers) == 2 else None), int(numbers[-1])


def _check_launcher(launcher: Launcher, job: Job, port: int | None) -> Job:
    """Return the job unchanged. If the launcher doesn't support an option of the job, raise UsageError."""
    unsupported, options = f"not supported with --on {launcher.name}", ", ".join(check_job(job).resources.named)
    if job.elastic_options and not launcher.elastic:
        *names, last = [starter.name for starter in find_startable_launchers().values() if starter.elastic]
        raise UsageError(f"{', '.join(job.elastic_options)}: {unsupported}; use --on {', '.join(names)} or {last}")
    if job.id and (job.standalone or job.rendezvous_backend == "static"):
        raise UsageError(f"--id: got {job.id}, but a static or single-host rendezvous has no id; remove --id")
    if options and not launcher.resources:
        raise UsageError(f"{options}: {unsupported}; use --on slurm, or lockstep submit")
    if port is not None and (reason := launcher.unused_port(job)):
        raise UsageError(f"--port: got {port}, but with --on {launcher.name} {reason}; remove --port")
    return job


def _add_id(launcher: Launcher, job: Job) -> Job:
    """If the job needs a rendezvous ID and this command starts all hosts, add a new ID. Return the job."""
    if job.id or job.rendezvous_backend == "static":
        return job
    if launcher.starts_all(job):
        return replace(job, id=uuid.uuid4().hex[:12])
    if job.rendezvous == "etcd-v2":  # etcd keeps a closed rendezvous, and rejects its ID if it is used again
        raise UsageError("--rendezvous: etcd-v2 requires an id for this start, the same on all hosts; pass it in --id")
    return job


def _check_node_rank(launcher: Launcher, job: Job, node_rank: int | None) -> None:
    needs_node_rank = not launcher.starts_all(job) and job.rendezvous_backend == "static"
    if node_rank is not None and not (needs_node_rank and node_rank < job.nodes):
        raise UsageError(
            f"--node-rank: got {node_rank} with --on {launcher.name} and {job.nodes} hosts; it must be below the "
            f"number of hosts, and is only supported with torchrun on several hosts and --rendezvous static"
        )
    if needs_node_rank and node_rank is None:
        raise UsageError(
            f"--on {launcher.name}: starts the processes of one of {job.nodes} hosts; pass the index of this host in "
            f"--node-rank, or use --on ssh, which starts all hosts"
        )


def _check_strategy(job: Job) -> None:
    """Raise UsageError if the strategy of a training job doesn't support the number of ranks."""
    if job.words[0] != "train" or job.min_nodes is not None or any(word.startswith("-") for word in job.words[1:]):
        return
    from lockstep.setup.strategy import check_strategy, find_strategy  # imported lazily, because torch takes seconds

    config = _load_config(job).config
    name, strategy = find_strategy(config.placement, job.processes)
    check_strategy(name, strategy, job.processes, config.recipe.microbatches)


def _load_config(job: Job) -> LoadedConfig:
    """Load the configuration of a training job. Raises ConfigError if its arguments are invalid."""
    from lockstep.config.load import load, split_arguments

    return load(*split_arguments(job.words[1:]))


def _exec_launcher(command_line: list[str], launcher: Launcher, secret: str) -> None:
    """Replace this process with the launcher, so that the launcher receives all signals.

    The launcher passes the secret to the processes that it starts in an environment variable.
    """
    env = {**os.environ, SECRET: secret} if secret else dict(os.environ)
    if shutil.which(command_line[0]) is None:
        raise UsageError(f"{command_line[0]} not found; install it, load its module, or use a different --on")
    sys.stdout.flush()
    with open_listening_socket() if launcher.followed else nullcontext() as listening:
        port = {SRUN_PORT: str(listening.getsockname()[1])} if listening else {}
        os.execvpe(command_line[0], command_line, env | port)


def _run_on_hosts(launcher: Launcher, command_lines: Mapping[str, list[str]], job: Job, secret: str) -> int:
    """Run a command for each host and return an exit code, by default the exit code of the first command that failed.

    torchrun exits with 1 even if the run saved a checkpoint and can be resumed, or if restarting the run would fail
    again. In these cases, the exit code is read from the run folder, if this host can access the run folder.
    """
    from lockstep.launchers.hosts import run_on_hosts

    program = next(iter(command_lines.values()))[0]  # all command lines start with the same program
    if shutil.which(program) is None:
        raise UsageError(f"{program} not found; install it, or use a different --on")
    previous_result = _read_result(job) if launcher.elastic else {}
    # Without torchrun's agents, each command is a rank on this host, so its exit code is the exit code of the rank.
    outcome = run_on_hosts(
        command_lines, _print_message, num_required=job.min_nodes, secret=secret, is_local=not launcher.elastic
    )
    code = outcome.code
    if code and launcher.elastic and (result := _read_result(job)) != previous_result:
        code = result.get("exit_code", code)
    if code in (EXIT_SAVED, EXIT_INTERRUPTED):
        return EXIT_INTERRUPTED if outcome.stop_signal == signal.SIGINT else EXIT_SAVED
    return code if code in PERSISTENT_EXITS else outcome.code


def _wait_for_host(host: str) -> None:
    """Wait until the name of the first node can be resolved.

    Platforms register the name only when the node is up.
    """
    if check_host_resolves(host):
        _print_message(f"waiting for an address of {host}, at most {_FIRST_NODE_TIMEOUT_S / 60:.0f} minutes")
        if problem := check_host_resolves(host, _FIRST_NODE_TIMEOUT_S):
            raise UsageError(f"{problem}; in the environment of the job, set the address of the first node")


def _print_message(text: str) -> None:
    with suppress(OSError):  # the terminal may have been closed; SIGHUP then ends the job
        print(text, file=sys.stderr, flush=True)


def _read_result(job: Job) -> dict[str, Any]:
    """Return the content of result.json in the run folder of a training job.

    Returns an empty dict if there is no result.json, or if the job has no run folder.
    """
    from lockstep.runs.runs import RESULT, read_json_dict

    if job.words[0] != "train":
        return {}
    with suppress(LockstepError):  # the ranks report invalid arguments
        folder = _load_config(job).config.run.dir
        return read_json_dict(Path(folder, RESULT)) if folder else {}
    return {}
