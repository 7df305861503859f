"""What is to be started where: the one thing that every launcher makes its command line from."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from lockstep.common.follow_parent import READS_SECRET
from lockstep.errors import UsageError

if TYPE_CHECKING:
    from jinja2 import Template

PORT: Final = 29_513
RESTARTS: Final = 10  # after failures, where a job is started again by itself
_GPUS: Final = re.compile(r"([A-Za-z0-9_.-]+:)?[1-9][0-9]*|")
_TRAINING: Final = ("train", "eval")  # the commands that know placement.processes
_PROCESSES: Final = "placement.processes"
_PYTHON: Final = ("python", "python3")  # either is the Python of the job
_OTHER_PYTHON: Final = re.compile(r".*/python[0-9.]*|python[0-9.]+")  # a path to one, or a version


@dataclass(frozen=True)
class Resources:
    """What a cluster is asked for besides hosts and processes; what is empty or 0 is left to the site."""

    partition: str = ""
    account: str = ""
    gpus_per_node: str = ""  # a number, or TYPE:NUMBER
    cpus_per_task: int = 0

    def processes_per_node(self, asked: int | None) -> int:
        """Return how many processes a host has: what is asked for, else one for each of its GPUs, or one."""
        number = self.gpus_per_node.rpartition(":")[2]
        return asked or (int(number) if number.isdecimal() else 0) or 1

    @property
    def named(self) -> dict[str, str]:
        """What is asked for, by the name of its option, which is Slurm's and ours."""
        return {f"--{field.replace('_', '-')}": str(value) for field, value in vars(self).items() if value}


@dataclass(frozen=True)
class Job:
    """`words` is what stands after `lockstep`. `hosts` is empty where the launcher finds them by itself.

    `options` go to the launcher as they are. `host` is the number of the host that a command line is for, where each
    host has one of its own. `first` is the address of the first host, where a platform says it. With `fewest` the job
    goes on as long as so many of its `nodes` are there. `restarts` is how often the processes are started again after
    one failed. `rendezvous` is how torchrun's agents meet, chosen for the job where it is empty, `endpoint` where, as
    HOST:PORT, left out the first host's `port`, and `id` tells their rendezvous from others at the same place.
    `signed`: the launcher brings the ranks a secret of the job, in `SECRET`. `folder` is where each host starts, for
    launchers that must be given it.
    """

    words: tuple[str, ...]
    python: str
    nodes: int = 1
    processes_per_node: int = 1
    hosts: tuple[str, ...] = ()
    port: int = PORT
    options: tuple[str, ...] = ()
    host: int = 0
    first: str = ""
    fewest: int | None = None
    restarts: int = 0
    rendezvous: str = ""
    endpoint: str = ""
    id: str = ""
    resources: Resources = Resources()
    signed: bool = False
    folder: str = ""

    @property
    def meets_by(self) -> str:
        """How torchrun's agents meet: as said, or in the simplest way that does."""
        return self.rendezvous or ("static" if self.fewest is None else "c10d")

    @property
    def meets_at(self) -> str:
        """Where torchrun's agents meet, as HOST:PORT."""
        return self.endpoint or f"{self.hosts[0] if self.hosts else 'localhost'}:{self.port}"

    @property
    def meets_on(self) -> str:
        """The host of that."""
        return self.meets_at.rpartition(":")[0].strip("[]")

    @property
    def standalone(self) -> bool:
        """Whether torchrun's only agent needs nobody to meet, and looks for a port by itself."""
        return self.nodes == 1 and not self.endpoint and self.rendezvous in ("", "c10d")

    @property
    def trains(self) -> bool:
        """Whether its words may say how many processes there are to be."""
        return self.words[0] in _TRAINING

    @property
    def elastic(self) -> list[str]:
        """What it asks for that only torchrun's agents can do."""
        asked = {"--nodes MIN:MAX": self.fewest, "--restarts": self.restarts, "--rendezvous": self.rendezvous}
        asked |= {"--endpoint": self.endpoint, "--id": self.id}
        return [option for option, value in asked.items() if value]

    @property
    def processes(self) -> int:
        """How many processes all hosts run."""
        return self.nodes * self.processes_per_node

    @property
    def is_script(self) -> bool:
        """Whether its words are `python SCRIPT ...`, a script of the user's own."""
        return bool(self.words) and self.words[0] in _PYTHON

    @property
    def module(self) -> list[str]:
        """What Python is to run, and its arguments."""
        return [*self.words[1:]] if self.is_script else ["-m", "lockstep", *self.words]

    @property
    def program(self) -> list[str]:
        """The command that one process runs."""
        return [self.python, *self.module]


def followed(job: Job, line: Sequence[str]) -> list[str]:
    """Return a line of a job as a command that ends with its stdin (follow_parent.py).

    The first line of its stdin is the secret of a job that has one.
    """
    secret = [READS_SECRET] if job.signed else []
    return [job.python, "-m", "lockstep.common.follow_parent", *secret, *line]


def with_python(words: tuple[str, ...]) -> tuple[str, ...]:
    """Return a command with `python` before a script that it begins with, as torchrun takes one."""
    return (_PYTHON[0], *words) if words and words[0].endswith(".py") else words


def template(file: Path) -> "Template":
    """Return the text that a cluster is given, with places for what a job says."""
    from jinja2 import Environment  # only now: the other commands need not wait for it

    return Environment(trim_blocks=True, keep_trailing_newline=True).from_string(file.read_text("utf-8"))


def check_job(job: Job) -> Job:
    """Return the job, or raise UsageError where it says two things at once."""
    problems = []
    if not job.words or (job.is_script and len(job.words) == 1):
        problems.append("nothing to start; give a command after --, such as -- train digits")
    elif not job.is_script and _OTHER_PYTHON.fullmatch(job.words[0]):
        script = " ".join(job.words[1:]) or "train.py"
        problems.append(f"{job.words[0]}: processes run with the Python of this environment; write python {script}")
    if job.fewest is not None and job.fewest > job.nodes:
        problems.append(f"--nodes: {job.fewest}:{job.nodes}: the first number is the smaller one")
    elif job.hosts and not (job.fewest or job.nodes) <= len(job.hosts) <= job.nodes:
        asked = f"{job.fewest}:{job.nodes}" if job.fewest else str(job.nodes)
        problems.append(f"--nodes: {asked} asked for, but {len(job.hosts)} hosts are named; leave one of them out")
    if job.fewest is not None and job.rendezvous == "static":
        problems.append("--rendezvous: static wants all hosts; for a number that changes use c10d or etcd-v2")
    if job.rendezvous == "etcd-v2" and not job.endpoint:
        problems.append("--rendezvous: etcd-v2, but no place of it; give --endpoint HOST:PORT")
    if job.endpoint and not (job.endpoint.rpartition(":")[0] and job.endpoint.rpartition(":")[2].isdecimal()):
        problems.append(f"--endpoint: expected HOST:PORT, got {job.endpoint}")
    twice = sorted({host for host in job.hosts if job.hosts.count(host) > 1})
    if twice:
        problems.append(f"--hosts: named more than once: {', '.join(twice)}; use --processes-per-node")
    problems += [f"--hosts: {host} cannot be the name of a host" for host in job.hosts if host.startswith("-")]
    problems += resource_problems(job)
    processes = [word.partition("=")[2] for word in job.words if word.startswith(f"{_PROCESSES}=")]
    if processes and job.trains and job.fewest is None:
        problems += other_processes(processes[-1], job.processes)
    if problems:
        raise UsageError("\n".join(problems))
    return job


def resource_problems(job: Job) -> list[str]:
    """Return what is wrong with what Slurm is asked for; empty where that is nothing."""
    problems, gpus = [], job.resources.gpus_per_node
    if not _GPUS.fullmatch(gpus):
        problems.append(f"--gpus-per-node: expected a number such as 4, or a100:4, got {gpus}")
    given = {word.partition("=")[0] for word in job.options}
    problems += [
        f"{name}: given in --option too; leave one of them out" for name in job.resources.named if name in given
    ]
    return problems


def other_processes(asked: str | int, processes: int) -> list[str]:
    """Return the problem of placement.processes that asks for other than so many; empty where there is none."""
    if str(asked) in ("auto", str(processes)):
        return []
    made = f"--nodes and --processes-per-node make {processes}"
    return [f"{_PROCESSES}: {asked} asked for, but {made}; leave {_PROCESSES} out"]
