"""ssh: a torchrun on each of several hosts, which follows the ssh that started it."""

import shlex
from dataclasses import replace
from typing import Final

from lockstep.common.follow_parent import KNOWS
from lockstep.errors import UsageError
from lockstep.launchers import agents
from lockstep.launchers.base import Launcher
from lockstep.launchers.job import Job, followed


def commands(job: Job) -> dict[str, list[str]]:
    """Return the line of each host that starts torchrun there, in the job's folder.

    What it starts there ends when the ssh here ends.
    """
    if not job.hosts:
        raise UsageError("--on ssh: no hosts are given; name them in --hosts FILE, one on each line")
    return {host: _line(replace(job, host=number)) for number, host in enumerate(job.hosts)}


def _line(job: Job) -> list[str]:
    # A host that is gone is noticed within 45 s; without a terminal, nobody could be asked for a password.
    alive = ["-o", "BatchMode=yes", "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=3"]
    # torchrun would try for minutes where its agents' meeting place has no address.
    knows = [] if job.standalone else [KNOWS, job.meets_on]
    agent = followed(job, [*knows, *agents.command(replace(job, options=()))])
    there = f"cd {shlex.quote(job.folder)} && exec {shlex.join(agent)}"
    return ["ssh", *alive, *job.options, job.hosts[job.host], there]


LAUNCHER: Final = Launcher("ssh", commands=commands, elastic=True)
