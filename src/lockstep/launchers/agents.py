"""The command line of torchrun's agent of one host, for each launcher that starts such agents."""

from typing import Final

from lockstep.errors import UsageError
from lockstep.launchers.job import Job

# An agent whose rank 0 has gone to another host gives its ranks the old address for good, where they meet at a store
# of the agents' (pytorch#182375 mended the other way round). With this, rank 0 opens one at each start.
OWN_STORE: Final = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
_LAST_CALL_S: Final = 5  # for others to come once there are enough; torch waits 30 s, at each start
_SIGNALS: Final = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"  # torch's own, and the warning of batch systems


def command(job: Job) -> list[str]:
    """Return the line for one host: the job's only one, or its host number `job.host`. Static, rank 0 is on the first.

    Of several hosts, whose number is fixed, the ranks learn how many they are to be: with clocks that differ, an agent
    may take the others for dead and start alone.
    """
    line = [job.python, "-m", "torch.distributed.run", *_rendezvous(job), f"--nproc-per-node={job.processes_per_node}"]
    if job.fewest is not None:
        line = ["env", OWN_STORE, *line]
    if job.restarts:
        line.append(f"--max-restarts={job.restarts}")
    fixed = job.nodes > 1 and job.fewest is None and job.trains
    count = [f"placement.processes={job.processes}"] if fixed else []
    return [*line, f"--signals-to-handle={_SIGNALS}", *job.options, *job.module, *count]


def _rendezvous(job: Job) -> list[str]:
    if job.standalone:
        return ["--standalone"]
    if not (job.endpoint or job.hosts or job.nodes == 1):
        raise UsageError(
            f"--nodes: {job.nodes} hosts for torchrun, but no place where they meet; give --endpoint HOST:PORT, "
            f"or name them in --hosts FILE"
        )
    nodes = f"--nnodes={job.nodes if job.fewest is None else f'{job.fewest}:{job.nodes}'}"
    if job.meets_by == "static":
        host, _, port = job.meets_at.rpartition(":")
        return [nodes, f"--node-rank={job.host}", f"--master-addr={host}", f"--master-port={port}"]
    words = [nodes, f"--rdzv-backend={job.meets_by}", f"--rdzv-endpoint={job.meets_at}"]
    if job.id:
        words.append(f"--rdzv-id={job.id}")
    if job.fewest is not None:
        words.append(f"--rdzv-conf=last_call_timeout={_LAST_CALL_S}")
    return words
