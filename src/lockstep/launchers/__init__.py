"""The launchers we detect: one file each, pure but for what is here, and never torch."""

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
    """What one launcher made of an environment: a rank, a problem, or neither where it is not the launcher."""

    launcher: Launcher
    info: RankInfo | None
    problem: str | None


# Who is asked, one after the other, until one decides. The one that started a process last comes first: what it started
# inherits the variables of all before.
ORDER: Final = (
    local.LAUNCHER,
    node.LAUNCHER,
    torchrun.LAUNCHER,  # srun and mpirun start it once on each host
    environment.LAUNCHER,  # a script made them of its launcher's own
    horovodrun.LAUNCHER,  # over MPI it sets no rank, and mpirun decides
    openmpi.LAUNCHER,  # in a Slurm job it starts its daemons by srun
    mpich.LAUNCHER,  # so does this one: SLURM_PROCID is that of the daemon
    slurm.LAUNCHER,
    ssh.LAUNCHER,
)


def detect(env: Mapping[str, str]) -> RankInfo | None:
    """Return what the launcher says of this process, or None where no launcher started it.

    A launcher's variables that are wrong raise UsageError. So does one of RANK and WORLD_SIZE alone, but only where no
    launcher decides: scripts for Slurm often set WORLD_SIZE, and leave the rank to srun.
    """
    for launcher in ORDER:
        info = launcher.detect(env) if launcher.detect else None
        if info is not None:
            return info
    environment.check_half_set(env)
    return None


def check_alone(work: str) -> None:
    """Raise UsageError where a launcher started this process, of a command that does its work by itself."""
    if detect(os.environ):
        raise UsageError(f"{work} itself; run it once, without a launcher")


def detect_rank() -> RankInfo | None:
    """Return this process's rank where a launcher started it, and tie its life to that launcher's."""
    info = detect(os.environ)
    if info is None:
        return None
    die_with_launcher(info.launcher)
    return slurm.resolve_master(info, os.environ)


def detect_all(env: Mapping[str, str]) -> tuple[Detection, ...]:
    """Return what each launcher makes of the environment, in order: the first that is not neither decides."""
    looks = []
    for launcher in ORDER:
        if launcher.detect:
            try:
                looks.append(Detection(launcher, launcher.detect(env), None))
            except UsageError as error:
                looks.append(Detection(launcher, None, str(error)))
    return tuple(looks)
