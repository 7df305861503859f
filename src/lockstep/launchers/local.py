"""Lockstep's own launcher, which starts all processes on this host."""

from typing import Final

from lockstep.errors import UsageError
from lockstep.launchers.base import Launcher
from lockstep.launchers.job import Job


def command(job: Job) -> list[str]:
    """Return the command line that starts the processes on this host."""
    if job.nodes > 1 or job.hosts:
        raise UsageError("--on local: only starts processes on this host; use --on ssh, slurm or openmpi instead")
    if job.options:
        raise UsageError(f"--on local: there is no launcher to pass {' '.join(job.options)} to; remove --option")
    if job.is_script:
        launch_words = [job.python, "-m", "lockstep", "launch", f"--processes-per-node={job.processes}", "--"]
        return [*launch_words, *job.words]
    if job.words[0] == "doctor" and all(
        word.startswith("-") for word in job.words[1:2]
    ):  # the full check, not a subcommand
        return [*job.program, f"--processes={job.processes}"]
    if not job.accepts_processes:
        raise UsageError(f"--on local: only starts train, eval and doctor; run lockstep {' '.join(job.words)} directly")
    return [*job.program, f"placement.processes={job.processes}"]


LAUNCHER: Final = Launcher(
    "local", command=command, unused_port=lambda _: "processes rendezvous in a file", signed=False
)
