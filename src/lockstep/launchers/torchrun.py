"""torchrun, and other tools based on torch's elastic agent, such as torch.distributed.launch."""

import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from lockstep.common.rank import RankInfo
from lockstep.errors import UsageError
from lockstep.launchers import environment
from lockstep.launchers.agents import OWN_STORE, make_agent_command
from lockstep.launchers.base import Launcher
from lockstep.launchers.job import Job

_AGENT_STORE_VARIABLE: Final = "TORCHELASTIC_USE_AGENT_STORE"
VARIABLES: Final = ("TORCHELASTIC_RUN_ID", *environment.VARIABLES)


def detect(env: Mapping[str, str]) -> RankInfo | None:
    """Return the rank of this process if an elastic agent started it, or else None."""
    if "TORCHELASTIC_RUN_ID" not in env:
        return None
    return replace(environment.read_torch_rank(env, "torchrun"), hosted=env.get(_AGENT_STORE_VARIABLE) == "True")


def check_hosts(agent_argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Raise UsageError if torchrun started on fewer hosts than its command line `agent_argv` requests.

    An agent whose clock is ahead considers all other agents dead as soon as they join, and starts alone. Workers only
    know the actual number of agents (GROUP_WORLD_SIZE). The requested number is on the command line (--nnodes, which
    defaults to 1).
    """
    (fewest, _), hosts = _parse_requested_hosts(agent_argv, env), int(env.get("GROUP_WORLD_SIZE", "1"))
    if hosts < fewest:
        raise UsageError(
            f"torchrun: --nnodes requests {fewest} hosts, but torchrun started with {hosts} "
            f"(GROUP_WORLD_SIZE={hosts}); synchronize the clocks of the hosts, because torchrun assumes that a host is "
            f"dead if its clock is 15 s behind"
        )


def check_restarts(agent_argv: Sequence[str], env: Mapping[str, str], folder: str | None) -> None:
    """Raise UsageError if torchrun may restart a training run, but there is no run `folder` to resume from."""
    restarts = env.get("TORCHELASTIC_MAX_RESTARTS", "0")
    fewest, most = _parse_requested_hosts(agent_argv, env)
    if not folder and (restarts != "0" or fewest < most):
        option = f"--nnodes={fewest}:{most}" if fewest < most else f"--max-restarts={restarts}"
        raise UsageError(
            f"run.dir: not set, but torchrun may restart the run ({option}), and each restart would begin a new run; "
            f"set a folder to resume from, such as run.dir=runs/a"
        )


def check_can_leave(agent_argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Raise UsageError if the job can't continue without one host, because its size is fixed or it never restarts."""
    fewest, most = _parse_requested_hosts(agent_argv, env)
    if env.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0" or fewest == most:
        raise UsageError(
            "placement.on_corruption: go_on requires torchrun with restarts and a variable number of hosts; pass "
            "--nnodes=MIN:MAX and --max-restarts=N to torchrun (--nodes MIN:MAX to lockstep launch)"
        )


def leave_job() -> None:
    """Ask the agent of this rank to exit, which removes its host from the job."""
    os.kill(os.getppid(), signal.SIGTERM)


def make_store_warning(agent_argv: Sequence[str], env: Mapping[str, str]) -> str:
    """Return a warning if an elastic torchrun runs without `OWN_STORE` in its environment, or else an empty string."""
    fewest, most = _parse_requested_hosts(agent_argv, env)
    if fewest == most or env.get(_AGENT_STORE_VARIABLE) != "True":
        return ""
    return (
        f"warning: torchrun --nnodes={fewest}:{most} without {OWN_STORE} in its environment: if the host of rank 0 "
        f"leaves, the next start may time out; set it on all hosts, or use lockstep launch"
    )


def _parse_requested_hosts(agent_argv: Sequence[str], env: Mapping[str, str]) -> tuple[int, int]:
    """Return the minimum and maximum number of hosts that torchrun was asked to run on."""
    values = [env.get("PET_NNODES", "")]
    for word, next_word in zip(agent_argv, [*agent_argv[1:], ""], strict=True):
        option, _, value = word.partition("=")
        if option == "--nnodes":
            values.append(value or next_word)
    fewest, _, most = values[-1].partition(":")
    minimum = int(fewest) if fewest.isdecimal() else 1
    return minimum, int(most) if most.isdecimal() else minimum


def unused_port(job: Job) -> str:
    """Return the reason why the job doesn't use --port, or an empty string if it does."""
    if job.endpoint:
        return f"the agents rendezvous at --endpoint {job.endpoint}"
    return "a single host picks a free port" if job.standalone else ""


LAUNCHER: Final = Launcher(
    "torchrun",
    detect,
    VARIABLES,
    make_agent_command,
    starts_all=lambda job: job.nodes == 1,
    unused_port=unused_port,
    elastic=True,
)
