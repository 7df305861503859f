"""torchrun, and all that is built on torch's elastic agent: torch.distributed.launch and our own local start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from lockstep.core.job import Job
from lockstep.core.rank import RankInfo
from lockstep.errors import UsageError
from lockstep.launchers import environment

VARIABLES: Final = ("TORCHELASTIC_RUN_ID", *environment.VARIABLES)


def detect(env: Mapping[str, str]) -> RankInfo | None:
    """Return the rank that the elastic agent gave this process, or None."""
    return environment.from_variables(env, "torchrun") if "TORCHELASTIC_RUN_ID" in env else None


def command(job: Job) -> list[str]:
    """Return the line for one host: the job's only one, or its host number `job.host`. Rank 0 is on the first."""
    if job.nodes == 1:
        meeting = ["--standalone"]
    elif not job.hosts:
        raise UsageError(f"--nodes: {job.nodes} hosts for torchrun, but nobody says which; name them in --hosts FILE")
    else:
        meeting = [
            f"--nnodes={job.nodes}",
            f"--node-rank={job.host}",
            f"--master-addr={job.hosts[0]}",
            f"--master-port={job.port}",
        ]
    count = f"--nproc-per-node={job.processes_per_node}"
    return [job.python, "-m", "torch.distributed.run", *meeting, count, *job.options, "-m", "lockstep", *job.words]
