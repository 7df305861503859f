"""Hydra, the mpiexec of MPICH and Intel MPI, which sets PMI_* and MPI_LOCAL* in each process."""

from collections.abc import Mapping
from typing import Final

from lockstep.common.rank import RankInfo
from lockstep.launchers.base import Launcher
from lockstep.launchers.variables import read_rank

VARIABLES: Final = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "MASTER_ADDR", "MASTER_PORT")
PORT: Final = 29_500  # torch's default port; Hydra provides no job ID from which a port could be derived
_MISSING_ADVICE: Final = "mpiexec of MPICH and Intel MPI sets it in each process"
_ADVICE: Final = "mpiexec does not provide the host of rank 0: mpiexec -genv MASTER_ADDR HOST ..."


def detect(env: Mapping[str, str]) -> RankInfo | None:
    """Return the rank that Hydra assigned to this process, or None.

    PMI_RANK alone doesn't identify Hydra, because `srun --mpi=pmi2` also sets it.
    """
    if "MPI_LOCALRANKID" not in env and "MPI_LOCALNRANKS" not in env:
        return None
    return read_rank(env, "mpich", VARIABLES[:4], port=PORT, missing_advice=_MISSING_ADVICE, advice=_ADVICE)


LAUNCHER: Final = Launcher("mpich", detect, VARIABLES)
