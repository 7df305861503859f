"""What is to be started where: the one thing that every launcher makes its command line from."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.errors import UsageError


@dataclass(frozen=True)
class Job:
    """`words` is what stands after `lockstep`. `hosts` is empty where the launcher finds them by itself.

    `options` go to the launcher as they are. `host` is the number of the host that a command line is for, where each
    host has one of its own.
    """

    words: tuple[str, ...]
    python: str
    nodes: int = 1
    processes_per_node: int = 1
    hosts: tuple[str, ...] = ()
    port: int = 29_513
    options: tuple[str, ...] = ()
    host: int = 0

    @property
    def processes(self) -> int:
        """How many processes all hosts run."""
        return self.nodes * self.processes_per_node

    @property
    def program(self) -> list[str]:
        """The command that one process runs."""
        return [self.python, "-m", "lockstep", *self.words]


def checked(job: Job) -> Job:
    """Return the job, or raise UsageError where it says two things at once."""
    problems = []
    if not job.words:
        problems.append("nothing to start; say what after --, such as -- train digits")
    if job.hosts and len(job.hosts) != job.nodes:
        problems.append(f"--nodes: {job.nodes} asked for, but {len(job.hosts)} hosts are named; leave one of them out")
    twice = sorted({host for host in job.hosts if job.hosts.count(host) > 1})
    if twice:
        problems.append(f"--hosts: named more than once: {', '.join(twice)}; use --processes-per-node")
    problems += [f"--hosts: {host} cannot be the name of a host" for host in job.hosts if host.startswith("-")]
    if problems:
        raise UsageError("\n".join(problems))
    return job
