"""ssh: a torchrun on each of several hosts, tied to the ssh that started it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from lockstep.core.job import Job


def command(job: Job, torchrun: Sequence[str], folder: str) -> list[str]:
    """Return the line that starts `torchrun` on the job's host number `job.host`, in `folder`.

    What it starts there ends when the ssh here ends.
    """
    # A host that is gone is noticed within 45 s; without a terminal, nobody could be asked for a password.
    alive = ["-o", "BatchMode=yes", "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=3"]
    tied = shlex.join([job.python, "-m", "lockstep.tether", *torchrun])
    return ["ssh", *alive, *job.options, job.hosts[job.host], f"cd {shlex.quote(folder)} && exec {tied}"]
