"""Detects the launcher of this process. The files of the launchers contain only pure functions. Never imports torch."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from lockstep.common.follow_parent import die_with_launcher
from lockstep.common.rank import RankInfo
from lockstep.errors import UsageError
from lockstep.launchers import environment, horovodrun, local, mpich, node, openmpi, slurm, ssh, torchrun
from lockstep.launchers.base import Launcher


@dataclass(frozen=True)
class Detection:
    """The result of detecting a launcher: a rank, a problem, or neither if the launcher didn't start this process."""

    launcher: Launcher
    info: RankInfo | None
    problem: str | None


# Launchers are tried in this order until one recognizes the process. Inner launchers come first, because a process
# inherits the variables of all outer launchers.
ORDER: Final = (
    local.LAUNCHER,
    node.LAUNCHER,
    torchrun.LAUNCHER,  # srun and mpirun may start torchrun once per host
    environment.LAUNCHER,  # a script may set RANK and WORLD_SIZE from the variables of its launcher
    horovodrun.LAUNCHER,  # with MPI, horovodrun sets no rank, so mpirun is detected
    openmpi.LAUNCHER,  # in a Slurm job, mpirun starts its daemons with srun
    mpich.LAUNCHER,  # Hydra also starts its daemons with srun, so SLURM_PROCID belongs to the daemon
    slurm.LAUNCHER,
    ssh.LAUNCHER,
)


def detect(env: Mapping[str, str]) -> RankInfo | None:
    """Return the rank that a launcher assigned to this process, or None if no launcher started it.

    Raises UsageError if a launcher's variables are invalid, or if no launcher is detected and only one of RANK and
    WORLD_SIZE is set. With a launcher, setting only one is allowed, because Slurm scripts often set WORLD_SIZE and
    leave the rank to srun.
    """
    for launcher in ORDER:
        info = launcher.detect(env) if launcher.detect else None
        if info is not None:
            return info
    environment.check_half_set(env)
    return None


def check_no_launcher(message_start: str) -> None:
    """Raise UsageError if a launcher started this process. Commands that start their own processes call this function.

    `message_start` is the beginning of the message, such as `plan starts the processes of each placement`.
    """
    if detect(os.environ):
        raise UsageError(f"{message_start} itself; run it once, without a launcher")


def detect_rank() -> RankInfo | None:
    """Return the rank of this process, or None without a launcher.

    Also arranges for this process to end when its launcher ends.
    """
    info = detect(os.environ)
    if info is None:
        return None
    die_with_launcher(info.launcher)
    return slurm.resolve_master(info, os.environ)


def detect_all(env: Mapping[str, str]) -> tuple[Detection, ...]:
    """Return the detection results of all launchers in order. The first result with a rank or a problem decides."""
    detections = []
    for launcher in ORDER:
        if launcher.detect:
            try:
                detections.append(Detection(launcher, launcher.detect(env), None))
            except UsageError as error:
                detections.append(Detection(launcher, None, str(error)))
    return tuple(detections)
