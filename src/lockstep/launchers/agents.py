"""The command line of a torchrun agent, for launchers that start one agent per host."""

from typing import Final

from lockstep.errors import UsageError
from lockstep.launchers.job import Job

# By default, the ranks share the store of the agents. If rank 0 then moves to a different host, the agents still pass
# the old address (pytorch#182375 only fixed the opposite case). With this setting, rank 0 opens a new store whenever
# the agents start the ranks.
OWN_STORE: Final = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
# How long to wait for more hosts once there are enough hosts. By default, torch waits 30 s before each start of the
# ranks.
_LAST_CALL_S: Final = 5
_SIGNALS: Final = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"  # torch's defaults, and the warning signal of batch systems


def make_agent_command(job: Job) -> list[str]:
    """Return the command line of the agent on host number `job.host_index`.

    With a static rendezvous, rank 0 is on the first host. If the number of hosts is fixed, the command line includes
    the expected number of processes, because an agent whose clock differs may consider all other agents dead and start
    alone.
    """
    words = [
        job.python,
        "-m",
        "torch.distributed.run",
        *_make_rendezvous_arguments(job),
        f"--nproc-per-node={job.processes_per_node}",
    ]
    if job.min_nodes is not None:
        words = ["env", OWN_STORE, *words]
    if job.restarts:
        words.append(f"--max-restarts={job.restarts}")
    fixed = job.nodes > 1 and job.min_nodes is None and job.accepts_processes
    process_words = [f"placement.processes={job.processes}"] if fixed else []
    return [*words, f"--signals-to-handle={_SIGNALS}", *job.options, *job.module, *process_words]


def _make_rendezvous_arguments(job: Job) -> list[str]:
    if job.standalone:
        return ["--standalone"]
    if not (job.endpoint or job.hosts or job.nodes == 1):
        raise UsageError(
            f"--nodes: {job.nodes} hosts for torchrun, but no rendezvous endpoint; pass --endpoint HOST:PORT, "
            f"or list the hosts in --hosts FILE"
        )
    nodes = f"--nnodes={job.nodes if job.min_nodes is None else f'{job.min_nodes}:{job.nodes}'}"
    if job.rendezvous_backend == "static":
        host, _, port = job.rendezvous_endpoint.rpartition(":")
        return [nodes, f"--node-rank={job.host_index}", f"--master-addr={host}", f"--master-port={port}"]
    arguments = [nodes, f"--rdzv-backend={job.rendezvous_backend}", f"--rdzv-endpoint={job.rendezvous_endpoint}"]
    if job.id:
        arguments.append(f"--rdzv-id={job.id}")
    if job.min_nodes is not None:
        arguments.append(f"--rdzv-conf=last_call_timeout={_LAST_CALL_S}")
    return arguments
