"""ssh: a torchrun on each of several hosts, tied to the ssh that started it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from lockstep.launchers.job import KNOWS, READS_SECRET, Job


def command(job: Job, torchrun: Sequence[str], folder: str) -> list[str]:
    """Return the line that starts `torchrun` on the job's host number `job.host`, in `folder`.

    What it starts there ends when the ssh here ends. The first line of its stdin is the secret of a job that has one.
    """
    # A host that is gone is noticed within 45 s; without a terminal, nobody could be asked for a password.
    alive = ["-o", "BatchMode=yes", "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=3"]
    secret = [READS_SECRET] if job.signed else []
    knows = [] if job.standalone else [KNOWS, job.meets_on]
    tied = shlex.join([job.python, "-m", "lockstep.tether", *secret, *knows, *torchrun])
    return ["ssh", *alive, *job.options, job.hosts[job.host], f"cd {shlex.quote(folder)} && exec {tied}"]
