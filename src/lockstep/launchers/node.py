"""Starts the ranks of a node, on platforms that start the same command on every node of a job.

The platform sets environment variables with the index of the node, the number of nodes and the address of the first
node. The command exits with the exit code of the ranks, and the platform uses it to decide which nodes to restart.
"""

import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from lockstep.common.rank import RankInfo
from lockstep.errors import UsageError
from lockstep.launchers import environment
from lockstep.launchers.base import Launcher
from lockstep.launchers.job import Job, follow_stdin

_STARTED: Final = "LOCKSTEP_NODE_STARTED"  # index of the node that started this rank
VARIABLES: Final = (_STARTED, *environment.VARIABLES)
NODES: Final = "LOCKSTEP_NODES"
FIRST_NODE: Final = "LOCKSTEP_FIRST_NODE"


@dataclass(frozen=True)
class Platform:
    """A platform, with the names of the environment variables that it sets on each node.

    `rank` is the variable with the index of the node. `main` is the variable with the index of the first node, for
    platforms on which it isn't always 0. `first` is the variable with the address of the first node. More addresses may
    follow, one per line.
    """

    name: str
    rank: str
    nodes: str
    first: str
    port: str = ""
    processes: str = ""
    main: str = ""


PLATFORMS: Final = (
    Platform(
        name="Kubeflow Trainer",
        rank="PET_NODE_RANK",
        nodes="PET_NNODES",
        first="PET_MASTER_ADDR",
        port="PET_MASTER_PORT",
        processes="PET_NPROC_PER_NODE",
    ),
    Platform(
        name="SkyPilot",
        rank="SKYPILOT_NODE_RANK",
        nodes="SKYPILOT_NUM_NODES",
        first="SKYPILOT_NODE_IPS",
        processes="SKYPILOT_NUM_GPUS_PER_NODE",
    ),
    Platform(
        name="AWS Batch",
        rank="AWS_BATCH_JOB_NODE_INDEX",
        nodes="AWS_BATCH_JOB_NUM_NODES",
        first="AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS",
        main="AWS_BATCH_JOB_MAIN_NODE_INDEX",
    ),
    Platform(name="Kubernetes", rank="JOB_COMPLETION_INDEX", nodes=NODES, first=FIRST_NODE),
    Platform(name="any other", rank="LOCKSTEP_NODE_RANK", nodes=NODES, first=FIRST_NODE),
)


def make_node_job(job: Job, env: Mapping[str, str], processes_per_node: int | None) -> Job:
    """Complete a job for this node from the variables in `env`.

    Raises UsageError if a variable is missing or invalid.
    """
    platform = next((entry for entry in PLATFORMS if entry.rank in env and entry.nodes in env), None)
    if platform is None:
        known_names = "; ".join(f"{entry.name}: {entry.rank} and {entry.nodes}" for entry in PLATFORMS)
        raise UsageError(
            f"--on node: the index of this node is not set; set the variables of one platform ({known_names})"
        )
    numbers_by_name = {
        name: _read_integer(env, name) for name in (platform.rank, platform.nodes, platform.main) if name
    }
    nodes = numbers_by_name[platform.nodes]
    rank = numbers_by_name[platform.rank] - numbers_by_name.get(platform.main, 0)
    if not -nodes < rank < nodes:
        raise UsageError(
            f"--on node: {platform.rank}={env[platform.rank]} is out of range for {platform.nodes}={nodes}; count "
            f"nodes from 0"
        )
    rank %= nodes
    # The platform may not tell the first node its address. In a job with a single node, no other node needs the
    # address.
    addresses = env.get(platform.first, "").split() or ([socket.gethostname()] if rank == 0 else [])
    if not addresses:
        raise UsageError(f"--on node: {platform.first} is not set, so node {rank} cannot find the first node; set it")
    processes = env.get(platform.processes, "")
    return replace(
        job,
        nodes=nodes,
        host_index=rank,
        first_address=addresses[0] if nodes > 1 else "",
        port=_read_integer(env, platform.port) if platform.port in env else job.port,
        processes_per_node=processes_per_node or (int(processes) if processes.isdecimal() else 0) or 1,
    )


def _read_integer(env: Mapping[str, str], variable: str) -> int:
    text = env.get(variable, "")
    if not text.isdecimal():
        raise UsageError(f"--on node: {variable}={text!r}; expected an integer")
    return int(text)


def detect(env: Mapping[str, str]) -> RankInfo | None:
    """Return the rank of this process if `lockstep launch --on node` started it, or else None."""
    if _STARTED not in env:
        return None
    return replace(environment.read_torch_rank(env, "node"), restarted_separately=True)


def commands(job: Job) -> dict[str, list[str]]:
    """Return the command line of each rank on this node. Each command ends when its stdin closes."""
    if job.options:
        raise UsageError(f"--on node: there is no launcher to pass {' '.join(job.options)} to; remove --option")
    processes_per_node = job.processes_per_node
    shared_variables = {
        _STARTED: job.host_index,
        "WORLD_SIZE": job.processes,
        "LOCAL_WORLD_SIZE": processes_per_node,
        "MASTER_ADDR": job.first_address,
        "MASTER_PORT": job.port,
    }
    lines = {}
    for local, rank in enumerate(range(job.host_index * processes_per_node, (job.host_index + 1) * processes_per_node)):
        variables = shared_variables | {"RANK": rank, "LOCAL_RANK": local}
        line = ["env", *(f"{name}={value}" for name, value in variables.items()), *job.program]
        lines[f"rank {rank}"] = follow_stdin(job, line)
    return lines


LAUNCHER: Final = Launcher("node", detect, VARIABLES, commands=commands, starts_all=lambda _: False)
