"""torchrun, and all that is built on torch's elastic agent, as torch.distributed.launch is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from lockstep.core.rank import RankInfo
from lockstep.errors import UsageError
from lockstep.launchers import environment
from lockstep.launchers.job import Job

_AGENT_LISTENS: Final = "TORCHELASTIC_USE_AGENT_STORE"
# An agent whose rank 0 has gone to another host tells its workers the old address for good, where they meet at a store
# of the agents' (pytorch#182375 mended the other way round). With this, rank 0 opens one at each start.
_OWN_STORE: Final = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
_LAST_CALL_S: Final = 5  # for others to come once there are enough; torch waits 30 s, at each start
_SIGNALS: Final = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"  # torch's own, and the warning of batch systems
VARIABLES: Final = ("TORCHELASTIC_RUN_ID", *environment.VARIABLES)


def detect(env: Mapping[str, str]) -> RankInfo | None:
    """Return the rank that the elastic agent gave this process, or None."""
    if "TORCHELASTIC_RUN_ID" not in env:
        return None
    return replace(environment.from_variables(env, "torchrun"), hosted=env.get(_AGENT_LISTENS) == "True")


def check_hosts(agent: Sequence[str], env: Mapping[str, str]) -> None:
    """Raise UsageError where torchrun, whose command line is `agent`, began with fewer hosts than it was to wait for.

    An agent whose clock is ahead takes the others for dead as soon as they have come, and starts alone. It tells its
    workers how many agents there are, each with as many workers as it likes, and not how many were asked for; a command
    line without --nnodes asks for one.
    """
    (fewest, _), hosts = _hosts(agent, env), int(env.get("GROUP_WORLD_SIZE", "1"))
    if hosts < fewest:
        raise UsageError(
            f"torchrun: --nnodes asks for {fewest} hosts, and it began with {hosts}, as "
            f"GROUP_WORLD_SIZE={hosts} says; it takes a host for dead whose clock is 15 s behind: set the clocks"
        )


def check_restarts(agent: Sequence[str], env: Mapping[str, str], folder: str | None) -> None:
    """Raise UsageError where torchrun would start a training again that has no run `folder`, and so cannot go on."""
    restarts = env.get("TORCHELASTIC_MAX_RESTARTS", "0")
    fewest, most = _hosts(agent, env)
    if not folder and (restarts != "0" or fewest < most):
        asked = f"--nnodes={fewest}:{most}" if fewest < most else f"--max-restarts={restarts}"
        raise UsageError(
            f"run.dir: left out, but torchrun may start the run again ({asked}), and without a folder to go on in each "
            f"start would begin a run of its own; name one, such as run.dir=runs/a"
        )


def warning(agent: Sequence[str], env: Mapping[str, str]) -> str:
    """Return what a user of a torchrun whose hosts may go should know, "" where there is nothing."""
    fewest, most = _hosts(agent, env)
    if fewest == most or env.get(_AGENT_LISTENS) != "True":
        return ""
    return (
        f"warning: torchrun --nnodes={fewest}:{most} without {_OWN_STORE} in its environment: once the host of rank 0 "
        f"goes, the next start may wait in vain; set it on all hosts, or start by lockstep launch"
    )


def _hosts(agent: Sequence[str], env: Mapping[str, str]) -> tuple[int, int]:
    """Return the fewest and the most hosts that torchrun was told of."""
    said = [env.get("PET_NNODES", "")]
    for word, following in zip(agent, [*agent[1:], ""], strict=True):
        option, _, value = word.partition("=")
        if option == "--nnodes":
            said.append(value or following)
    fewest, _, most = said[-1].partition(":")
    number = int(fewest) if fewest.isdecimal() else 1
    return number, int(most) if most.isdecimal() else number


def command(job: Job) -> list[str]:
    """Return the line for one host: the job's only one, or its host number `job.host`. Static, rank 0 is on the first.

    Of several hosts, whose number is fixed, the ranks learn how many they are to be: with clocks that differ, an agent
    may take the others for dead and start alone.
    """
    line = [job.python, "-m", "torch.distributed.run", *_rendezvous(job), f"--nproc-per-node={job.processes_per_node}"]
    if job.fewest is not None:
        line = ["env", _OWN_STORE, *line]
    if job.restarts:
        line.append(f"--max-restarts={job.restarts}")
    fixed = job.nodes > 1 and job.fewest is None and job.trains
    told = [f"placement.processes={job.processes}"] if fixed else []
    return [*line, f"--signals-to-handle={_SIGNALS}", *job.options, *job.module, *told]


def _rendezvous(job: Job) -> list[str]:
    if job.standalone:
        return ["--standalone"]
    if not (job.endpoint or job.hosts or job.nodes == 1):
        raise UsageError(
            f"--nodes: {job.nodes} hosts for torchrun, but nobody says where they meet; say --endpoint HOST:PORT, "
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
