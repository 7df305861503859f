"""The description of a job, from which each launcher builds its command line."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from lockstep.common.follow_parent import SECRET_FLAG
from lockstep.errors import UsageError

if TYPE_CHECKING:
    from jinja2 import Template

PORT: Final = 29_513
RESTARTS: Final = 10  # number of restarts after failures, if the job restarts automatically
_GPUS: Final = re.compile(r"([A-Za-z0-9_.-]+:)?[1-9][0-9]*|")
_TRAINING: Final = ("train", "eval")  # commands that accept placement.processes
_PROCESSES: Final = "placement.processes"
_PYTHON: Final = ("python", "python3")  # replaced with the Python interpreter of the job
_OTHER_PYTHON: Final = re.compile(r".*/python[0-9.]*|python[0-9.]+")  # a path, or a name with a version


@dataclass(frozen=True)
class Resources:
    """Cluster resources to request in addition to hosts and processes. Empty or 0 means the default of the cluster."""

    partition: str = ""
    account: str = ""
    gpus_per_node: str = ""  # a number, or TYPE:NUMBER
    cpus_per_task: int = 0

    def processes_per_node(self, requested: int | None) -> int:
        """Return the number of processes per host: `requested`, or else one per requested GPU, or else one."""
        gpu_count = self.gpus_per_node.rpartition(":")[2]
        return requested or (int(gpu_count) if gpu_count.isdecimal() else 0) or 1

    @property
    def named(self) -> dict[str, str]:
        """The requested resources by option name. The names are the same in Slurm and in Lockstep."""
        return {f"--{field.replace('_', '-')}": str(value) for field, value in vars(self).items() if value}


@dataclass(frozen=True)
class Job:
    """A job to launch.

    - `words`: The arguments after `lockstep`.
    - `hosts`: The host names. Empty if the launcher finds the hosts itself.
    - `options`: Additional options, which are passed to the launcher unchanged.
    - `host_index`: The index of the host that a command line is for, if each host has a separate command line.
    - `first_address`: The address of the first host, if the platform provides it.
    - `min_nodes`: If set, the job continues as long as at least this many of its `nodes` are available.
    - `restarts`: The number of times that all processes are restarted after a failure.
    - `rendezvous`: The rendezvous backend of torchrun's agents. If empty, it is chosen automatically.
    - `endpoint`: The rendezvous endpoint as HOST:PORT. Defaults to `port` on the first host.
    - `id`: The rendezvous ID, which separates jobs that share an endpoint.
    - `signed`: Whether the launcher passes a secret to the ranks in `SECRET`.
    - `folder`: The working directory on each host, for launchers that need it.
    """

    words: tuple[str, ...]
    python: str
    nodes: int = 1
    processes_per_node: int = 1
    hosts: tuple[str, ...] = ()
    port: int = PORT
    options: tuple[str, ...] = ()
    host_index: int = 0
    first_address: str = ""
    min_nodes: int | None = None
    restarts: int = 0
    rendezvous: str = ""
    endpoint: str = ""
    id: str = ""
    resources: Resources = Resources()
    signed: bool = False
    folder: str = ""

    @property
    def rendezvous_backend(self) -> str:
        """The rendezvous backend of torchrun's agents. Defaults to the simplest backend that works."""
        return self.rendezvous or ("static" if self.min_nodes is None else "c10d")

    @property
    def rendezvous_endpoint(self) -> str:
        """The rendezvous endpoint of torchrun's agents, as HOST:PORT."""
        return self.endpoint or f"{self.hosts[0] if self.hosts else 'localhost'}:{self.port}"

    @property
    def rendezvous_host(self) -> str:
        """The host of the rendezvous endpoint."""
        return self.rendezvous_endpoint.rpartition(":")[0].strip("[]")

    @property
    def standalone(self) -> bool:
        """Whether torchrun's agent runs standalone, without a rendezvous with other hosts.

        A standalone agent chooses a free port itself.
        """
        return self.nodes == 1 and not self.endpoint and self.rendezvous in ("", "c10d")

    @property
    def accepts_processes(self) -> bool:
        """Whether the command accepts `placement.processes`."""
        return self.words[0] in _TRAINING

    @property
    def elastic_options(self) -> list[str]:
        """The requested options that only torchrun's agents support."""
        requested = {"--nodes MIN:MAX": self.min_nodes, "--restarts": self.restarts, "--rendezvous": self.rendezvous}
        requested |= {"--endpoint": self.endpoint, "--id": self.id}
        return [option for option, value in requested.items() if value]

    @property
    def processes(self) -> int:
        """The total number of processes on all hosts."""
        return self.nodes * self.processes_per_node

    @property
    def is_script(self) -> bool:
        """Whether the command is `python SCRIPT ...`, which runs a user's script."""
        return bool(self.words) and self.words[0] in _PYTHON

    @property
    def module(self) -> list[str]:
        """The script or module to run with Python, and its arguments."""
        return [*self.words[1:]] if self.is_script else ["-m", "lockstep", *self.words]

    @property
    def program(self) -> list[str]:
        """The command that runs a single process."""
        return [self.python, *self.module]


def follow_stdin(job: Job, command_line: Sequence[str]) -> list[str]:
    """Wrap a command line so that the command ends when its stdin closes (follow_parent.py).

    If the job has a secret, the command reads the secret from the first line of stdin.
    """
    secret = [SECRET_FLAG] if job.signed else []
    return [job.python, "-m", "lockstep.common.follow_parent", *secret, *command_line]


def insert_python(words: tuple[str, ...]) -> tuple[str, ...]:
    """Insert `python` if a command starts with a script. torchrun accepts such commands too."""
    return (_PYTHON[0], *words) if words and words[0].endswith(".py") else words


def load_template(file: Path) -> "Template":
    """Load the Jinja template of a batch script or manifest."""
    from jinja2 import Environment  # imported lazily, so that other commands start faster

    return Environment(trim_blocks=True, keep_trailing_newline=True).from_string(file.read_text("utf-8"))


def check_job(job: Job) -> Job:
    """Return the job unchanged. If its options are incomplete or contradictory, raise UsageError with all problems."""
    problems = []
    if not job.words or (job.is_script and len(job.words) == 1):
        problems.append("no command to start; pass one after --, such as -- train digits")
    elif not job.is_script and _OTHER_PYTHON.fullmatch(job.words[0]):
        script = " ".join(job.words[1:]) or "train.py"
        problems.append(f"{job.words[0]}: processes run with the Python of this environment; use python {script}")
    if job.min_nodes is not None and job.min_nodes > job.nodes:
        problems.append(f"--nodes: {job.min_nodes}:{job.nodes} has a larger minimum than maximum; pass MIN:MAX")
    elif job.hosts and not (job.min_nodes or job.nodes) <= len(job.hosts) <= job.nodes:
        requested = f"{job.min_nodes}:{job.nodes}" if job.min_nodes else str(job.nodes)
        problems.append(
            f"--nodes: got {requested}, but --hosts names {len(job.hosts)} hosts; remove one of the options"
        )
    if job.min_nodes is not None and job.rendezvous == "static":
        problems.append("--rendezvous: static does not support --nodes MIN:MAX; use c10d or etcd-v2")
    if job.rendezvous == "etcd-v2" and not job.endpoint:
        problems.append("--rendezvous: etcd-v2 requires an endpoint; pass --endpoint HOST:PORT")
    if job.endpoint and not (job.endpoint.rpartition(":")[0] and job.endpoint.rpartition(":")[2].isdecimal()):
        problems.append(f"--endpoint: expected HOST:PORT, got {job.endpoint}")
    duplicates = sorted({host for host in job.hosts if job.hosts.count(host) > 1})
    if duplicates:
        problems.append(
            f"--hosts: listed more than once: {', '.join(duplicates)}; list each host once, and set "
            f"--processes-per-node"
        )
    problems += [f"--hosts: {host} is not a valid host name; remove it" for host in job.hosts if host.startswith("-")]
    problems += find_resource_problems(job)
    processes = [word.partition("=")[2] for word in job.words if word.startswith(f"{_PROCESSES}=")]
    if processes and job.accepts_processes and job.min_nodes is None:
        problems += find_process_problems(processes[-1], job.processes)
    if problems:
        raise UsageError("\n".join(problems))
    return job


def find_resource_problems(job: Job) -> list[str]:
    """Return a list of the problems with the resources that a job requests from Slurm."""
    problems, gpus = [], job.resources.gpus_per_node
    if not _GPUS.fullmatch(gpus):
        problems.append(f"--gpus-per-node: expected a number such as 4, or a100:4, got {gpus}")
    option_names = {word.partition("=")[0] for word in job.options}
    problems += [
        f"{name}: also set with --option; remove one of the two" for name in job.resources.named if name in option_names
    ]
    return problems


def find_process_problems(requested: str | int, num_processes: int) -> list[str]:
    """Return a list with one problem if `requested`, the value of placement.processes, isn't `num_processes`."""
    if str(requested) in ("auto", str(num_processes)):
        return []
    started = f"--nodes and --processes-per-node start {num_processes}"
    return [f"{_PROCESSES}: got {requested}, but {started}; unset {_PROCESSES}"]
