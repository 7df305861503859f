"""horovodrun with gloo, which sets HOROVOD_* in each process. With MPI, horovodrun runs mpirun, which sets the rank."""

from collections.abc import Mapping
from typing import Final
from zlib import crc32

from lockstep.common.rank import RankInfo
from lockstep.launchers.base import Launcher
from lockstep.launchers.variables import MASTER, RANK_SUFFIXES, derive_port, read_rank

VARIABLES: Final = (
    *(f"HOROVOD_{suffix}" for suffix in RANK_SUFFIXES),
    *("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT", *MASTER),
)
_MISSING_ADVICE: Final = "horovodrun sets it in each process"
# HOROVOD_GLOO_RENDEZVOUS_ADDR can't be used, because it is the host of horovodrun, which may not be a host of the job.
_ADVICE: Final = "horovodrun does not provide the host of rank 0: export MASTER_ADDR=HOST before horovodrun"


def detect(env: Mapping[str, str]) -> RankInfo | None:
    """Return the rank that horovodrun assigned to this process, or None."""
    if "HOROVOD_RANK" not in env and "HOROVOD_SIZE" not in env:
        return None
    rendezvous = ":".join(env.get(name, "") for name in VARIABLES[4:6])  # unique to the job, and the same on all ranks
    port = derive_port(crc32(rendezvous.encode()))
    return read_rank(env, "horovodrun", VARIABLES[:4], port=port, missing_advice=_MISSING_ADVICE, advice=_ADVICE)


LAUNCHER: Final = Launcher("horovodrun", detect, VARIABLES)
