"""ssh: a torchrun on each of several hosts, which follows the ssh that started it."""

import shlex
from dataclasses import replace
from typing import Final

from lockstep.common.follow_parent import KNOWS
from lockstep.errors import UsageError
from lockstep.launchers import agents
from lockstep.launchers.base import Launcher
from lockstep.launchers.job import Job, followed


def command(job: Job) -> list[str]:
    """Return the line that starts torchrun on the job's host number `job.host`, in the job's folder.

    What it starts there ends when the ssh here ends.
    """
    if not job.hosts:
        raise UsageError("--on ssh: no hosts are given; name them in --hosts FILE, one on each line")
    # A host that is gone is noticed within 45 s; without a terminal, nobody could be asked for a password.
    alive = ["-o", "BatchMode=yes", "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=3"]
    # It ends at once where the agents' meeting place has no address: torchrun would try for minutes.
    knows = [] if job.standalone else [KNOWS, job.meets_on]
    agent = followed(job, [*knows, *agents.command(replace(job, options=()))])
    there = f"cd {shlex.quote(job.folder)} && exec {shlex.join(agent)}"
    return ["ssh", *alive, *job.options, job.hosts[job.host], there]


LAUNCHER: Final = Launcher("ssh", command=command, per_host=True, elastic=True)
