"""Slurm's srun, which sets SLURM_* in each task of a job step. For the queue, see batch.py."""

import re
import socket
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Final

from lockstep.common.rank import RankInfo
from lockstep.launchers.base import Launcher
from lockstep.launchers.hostlist import expand_counts, expand_hosts
from lockstep.launchers.job import Job
from lockstep.launchers.variables import MASTER, Variables, check_range, derive_port

VARIABLES: Final = (
    *(f"SLURM_{suffix}" for suffix in ("JOB_ID", "STEP_ID", "PROCID", "LOCALID", "NODEID")),
    *(f"SLURM_STEP_{suffix}" for suffix in ("NUM_TASKS", "TASKS_PER_NODE", "NODELIST")),
    *("SLURM_DISTRIBUTION", *MASTER),
)
_MIN_PSEUDO_STEP: Final = 4_294_967_290  # step IDs of batch scripts, shells and so on are at least this (0xfffffffa)
_SCONTROL_TIMEOUT_S: Final = 5.0
_PORTS_PER_JOB: Final = 16  # ports per job, so that the first job steps of consecutive jobs use different ports
_MISSING_ADVICE: Final = "srun sets it in each task; start lockstep directly with srun, and do not change its variables"


def detect(env: Mapping[str, str]) -> RankInfo | None:
    """Return the rank of this process if it is a task of a Slurm job step, or else None.

    The variables of a job aren't sufficient, because batch scripts and shells also have these variables, and batch
    scripts even have SLURM_PROCID=0. A step with a single task, such as `srun --pty bash`, is treated as if there were
    no launcher.
    """
    if not _is_multi_task_step(env):
        return None
    variables = Variables(env, _MISSING_ADVICE)
    rank = variables.read_number("SLURM_PROCID")
    size = variables.read_number("SLURM_STEP_NUM_TASKS")
    local_rank = variables.read_number("SLURM_LOCALID")
    node = variables.read_number("SLURM_NODEID")
    tasks_per_node = variables.parse("SLURM_STEP_TASKS_PER_NODE", expand_counts)
    nodes = variables.parse("SLURM_STEP_NODELIST", expand_hosts)
    port = variables.read_port(
        derive_port(variables.read_number("SLURM_JOB_ID") * _PORTS_PER_JOB + variables.read_number("SLURM_STEP_ID"))
    )
    if not variables.problems:
        _check_consistency(variables, rank, size, local_rank, node, tasks_per_node, len(nodes))
    if (
        not variables.problems
        and not env.get("MASTER_ADDR")
        and not _is_rank_0_on_first_host(env, rank, node, len(nodes))
    ):
        variables.problems.append(
            f"SLURM_DISTRIBUTION={env.get('SLURM_DISTRIBUTION', '')}: rank 0 is not on the first host of "
            f"{env['SLURM_STEP_NODELIST']}, and srun does not provide its host; export MASTER_ADDR=HOST"
        )
    variables.check()
    master = env.get("MASTER_ADDR") or (nodes[0] if len(nodes) > 1 else "127.0.0.1")
    return RankInfo(rank, size, local_rank, tasks_per_node[node], "slurm", master, port)


def make_warning(env: Mapping[str, str], num_processes: int | str = 1) -> str:
    """Return a warning if this process is in a Slurm job with multiple tasks but wasn't started by srun, or else "".

    `num_processes` is the number of processes that Lockstep starts on this host. If it equals the number of tasks and
    all tasks are on this host, there is no warning.
    """
    tasks, nodes = env.get("SLURM_NTASKS", ""), env.get("SLURM_JOB_NUM_NODES", "1")
    if not env.get("SLURM_JOB_ID") or not tasks.isdecimal() or int(tasks) < 2:
        return ""
    if nodes == "1" and str(num_processes) == tasks:
        return ""
    return (
        f"warning: this Slurm job has {tasks} tasks (SLURM_NTASKS), but srun did not start this process, so the run "
        f"only uses this host; start the command with srun, or request one task (--ntasks=1)"
    )


def resolve_master(info: RankInfo, env: Mapping[str, str]) -> RankInfo:
    """If this host can't resolve the host name of rank 0, replace the name with the address that Slurm reports.

    If Slurm doesn't know the address either, the name is kept, and the rendezvous raises the error.
    """
    name = info.master or ""
    if info.launcher != "slurm" or env.get("MASTER_ADDR") or _can_resolve(name):
        return info
    address = parse_node_address(_query_node(name))
    if (
        not address
        and env.get("ENVIRONMENT") == "BATCH"
        and name in _expand_first_host(env.get("SLURM_JOB_NODELIST", ""))
    ):
        # Address of the host that called srun; batch scripts run on the first host of the job.
        address = env.get("SLURM_LAUNCH_NODE_IPADDR", "")
    return replace(info, master=address) if _can_resolve(address) else info


def parse_node_address(text: str) -> str:
    """Return the address in the output of `scontrol show node NAME`, or an empty string if there is none."""
    match = re.search(r"(?:^|\s)NodeAddr=(\S+)", text)
    return match[1] if match else ""


def _query_node(name: str) -> str:
    # These errors mean that scontrol isn't installed, or that Slurm doesn't respond.
    with suppress(OSError, subprocess.TimeoutExpired):
        command = ["scontrol", "show", "node", name]
        return subprocess.run(command, capture_output=True, text=True, timeout=_SCONTROL_TIMEOUT_S, check=False).stdout
    return ""


def _expand_first_host(nodes: str) -> tuple[str, ...]:
    with suppress(ValueError):
        return expand_hosts(nodes)[:1]
    return ()


def _can_resolve(host: str) -> bool:
    """Return whether a host name or address can be resolved on this host."""
    with suppress(OSError, UnicodeError):
        return bool(host and socket.getaddrinfo(host, None))
    return False


def command(job: Job) -> list[str]:
    """Return the command line of srun, which uses the current allocation or requests one.

    A failed task ends all tasks.
    """
    per_node = job.processes_per_node
    layout = [f"--nodes={job.nodes}", f"--ntasks={job.processes}", f"--ntasks-per-node={per_node}"]
    host_words = [f"--nodelist={','.join(job.hosts)}"] if job.hosts else []
    resource_words = [f"{option}={value}" for option, value in job.resources.named.items()]
    return ["srun", *layout, *host_words, "--kill-on-bad-exit=1", *resource_words, *job.options, *job.program]


_UNUSED_PORT: Final = "the port is derived from the job and step IDs, or set by MASTER_PORT"
LAUNCHER: Final = Launcher(
    "slurm", detect, VARIABLES, command, unused_port=lambda _: _UNUSED_PORT, resources=True, followed=True
)


def _is_multi_task_step(env: Mapping[str, str]) -> bool:
    step = env.get("SLURM_STEP_ID", "")
    pseudo = step.isdecimal() and int(step) >= _MIN_PSEUDO_STEP
    return bool(step) and not pseudo and "SLURM_PROCID" in env and env.get("SLURM_STEP_NUM_TASKS") != "1"


def _check_consistency(
    variables: Variables,
    rank: int,
    size: int,
    local_rank: int,
    node: int,
    tasks_per_node: tuple[int, ...],
    num_nodes: int,
) -> None:
    """Record a problem if Slurm's variables contradict each other."""
    check_range(variables, "SLURM_PROCID", rank, "SLURM_STEP_NUM_TASKS", size)
    if not len(tasks_per_node) == num_nodes > node or sum(tasks_per_node) != size:
        variables.problems.append(
            f"the variables contradict each other: SLURM_STEP_TASKS_PER_NODE has {sum(tasks_per_node)} tasks on "
            f"{len(tasks_per_node)} hosts, SLURM_STEP_NUM_TASKS={size}, SLURM_STEP_NODELIST has {num_nodes} hosts, "
            f"SLURM_NODEID={node}; do not change the variables of srun"
        )
    elif local_rank >= tasks_per_node[node]:
        variables.problems.append(
            f"SLURM_LOCALID={local_rank}: expected less than {tasks_per_node[node]}, the number of tasks on host {node}"
        )


def _is_rank_0_on_first_host(env: Mapping[str, str], rank: int, node: int, num_nodes: int) -> bool:
    """Return whether rank 0 is on the first host. This is the case unless the task distribution is arbitrary."""
    arbitrary = env.get("SLURM_DISTRIBUTION", "").startswith("arbitrary")
    return num_nodes == 1 or not (arbitrary or (rank == 0 and node))
