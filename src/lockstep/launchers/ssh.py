"""Starts torchrun on multiple hosts with ssh. Each torchrun exits when its ssh connection ends."""

import shlex
from dataclasses import replace
from typing import Final

from lockstep.common.follow_parent import RESOLVE_FLAG
from lockstep.errors import UsageError
from lockstep.launchers import agents
from lockstep.launchers.base import Launcher
from lockstep.launchers.job import Job, follow_stdin


def commands(job: Job) -> dict[str, list[str]]:
    """Return an ssh command line for each host, which starts torchrun in the working directory of the job.

    The remote processes end when the local ssh ends.
    """
    if not job.hosts:
        raise UsageError("--on ssh: no hosts; list the hosts in --hosts FILE, one per line")
    return {host: _make_ssh_command(replace(job, host_index=index)) for index, host in enumerate(job.hosts)}


def _make_ssh_command(job: Job) -> list[str]:
    # With these options, ssh detects an unreachable host within 45 s. It never asks for a password, because there may
    # be no terminal.
    ssh_options = ["-o", "BatchMode=yes", "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=3"]
    # First check on each host that the rendezvous host can be resolved. Otherwise, torchrun would retry for minutes.
    resolve_check = [] if job.standalone else [RESOLVE_FLAG, job.rendezvous_host]
    agent = follow_stdin(job, [*resolve_check, *agents.make_agent_command(replace(job, options=()))])
    remote_command = f"cd {shlex.quote(job.folder)} && exec {shlex.join(agent)}"
    return ["ssh", *ssh_options, *job.options, job.hosts[job.host_index], remote_command]


LAUNCHER: Final = Launcher("ssh", commands=commands, elastic=True)
