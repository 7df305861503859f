"""mpirun of Open MPI, which sets OMPI_COMM_WORLD_* in each process."""

from collections.abc import Mapping
from typing import Final
from zlib import crc32

from lockstep.common.hashing import SEED_VARIABLE
from lockstep.common.rank import SECRET, RankInfo
from lockstep.launchers.base import Launcher
from lockstep.launchers.job import Job
from lockstep.launchers.variables import MASTER, RANK_SUFFIXES, derive_port, read_rank

VARIABLES: Final = (*(f"OMPI_COMM_WORLD_{suffix}" for suffix in RANK_SUFFIXES), "PMIX_NAMESPACE", *MASTER)
_MISSING_ADVICE: Final = "mpirun of Open MPI sets it in each process"
# OMPI_MCA_orte_hnp_uri can't be used, because it is the host of mpirun, which may not be a host of the job.
_ADVICE: Final = "mpirun does not provide the host of rank 0: mpirun -x MASTER_ADDR=HOST ..."


def detect(env: Mapping[str, str]) -> RankInfo | None:
    """Return the rank that mpirun assigned to this process, or None."""
    if "OMPI_COMM_WORLD_RANK" not in env and "OMPI_COMM_WORLD_SIZE" not in env:
        return None
    port = derive_port(crc32(env.get("PMIX_NAMESPACE", "").encode()))  # job ID, which is the same on all ranks
    return read_rank(env, "openmpi", VARIABLES[:4], port=port, missing_advice=_MISSING_ADVICE, advice=_ADVICE)


def command(job: Job) -> list[str]:
    """Return the command line of mpirun. Without host names, mpirun uses the hosts of a batch system, or this host."""
    per_node = job.processes_per_node
    hosts = job.hosts or (("localhost",) if job.nodes == 1 else ())
    host_words = ["--host", ",".join(f"{host}:{per_node}" for host in hosts)] if hosts else []
    address_words = ["-x", f"MASTER_ADDR={job.hosts[0]}", "-x", f"MASTER_PORT={job.port}"] if len(job.hosts) > 1 else []
    # Passed as an environment variable, because other users can read command lines.
    secret_words = ["-x", SECRET] if job.signed else []
    # mpirun doesn't forward the environment to other hosts. `lockstep` commands set the hash seed themselves, but
    # scripts don't.
    hash_seed_words = ["-x", SEED_VARIABLE] if job.is_script and len(job.hosts) > 1 else []
    layout = [
        "--map-by",
        f"ppr:{per_node}:node",
        "--bind-to",
        "none",
    ]  # by default, mpirun binds a process and its threads to one core
    return [
        "mpirun",
        "-n",
        str(job.processes),
        *layout,
        *host_words,
        *address_words,
        *hash_seed_words,
        *secret_words,
        *job.options,
        *job.program,
    ]


def unused_port(job: Job) -> str:
    """Return the reason why the job doesn't use --port, or an empty string if it does."""
    return "" if len(job.hosts) > 1 else "the port is derived from the job ID, or set by mpirun -x MASTER_PORT=PORT"


LAUNCHER: Final = Launcher("openmpi", detect, VARIABLES, command, unused_port=unused_port)
