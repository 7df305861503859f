"""Slurm: its srun, which sets SLURM_* in each task of a step, and the batch scripts that call it."""

from __future__ import annotations

import re
import shlex
import socket
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from lockstep.core.rank import SECRET, RankInfo
from lockstep.errors import UsageError
from lockstep.launchers.base import Launcher
from lockstep.launchers.hostlist import counts, hosts
from lockstep.launchers.job import Job, Resources, resource_problems
from lockstep.launchers.variables import Variables, check_range, port_of

VARIABLES: Final = (
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_STEP_NODELIST",
    "SLURM_DISTRIBUTION",
    "MASTER_ADDR",
    "MASTER_PORT",
)
_PSEUDO_STEPS: Final = 4_294_967_290  # and above (0xfffffffa): batch scripts, interactive shells and the like
_ANSWER_S: Final = 5.0
_LONGEST_WARNING_S: Final = 65_535  # Slurm's own limit
_TIME: Final = re.compile(r"(?:(\d+)-(\d+)(?::(\d+)(?::(\d+))?)?|(?:(\d+):)?(\d+):(\d+)|(\d+))", re.ASCII)
_STEPS: Final = 16  # ports between those of two jobs: the first steps of neighbours do not share one
_MISSING: Final = "srun sets it in each task; start lockstep by srun itself, with its variables left as they are"


def detect(env: Mapping[str, str]) -> RankInfo | None:
    """Return the rank of this task of a step, or None.

    A job alone is no sign: batch scripts and shells have its variables too, batch scripts even SLURM_PROCID=0. Nor is a
    step of one task, such as `srun --pty bash`: it is a place like any machine.
    """
    if not _is_task_of_many(env):
        return None
    variables = Variables(env, _MISSING)
    rank = variables.number("SLURM_PROCID")
    size = variables.number("SLURM_STEP_NUM_TASKS")
    local_rank = variables.number("SLURM_LOCALID")
    node = variables.number("SLURM_NODEID")
    on_nodes = variables.parsed("SLURM_STEP_TASKS_PER_NODE", counts)
    nodes = variables.parsed("SLURM_STEP_NODELIST", hosts)
    port = variables.port(port_of(variables.number("SLURM_JOB_ID") * _STEPS + variables.number("SLURM_STEP_ID")))
    if not variables.wrong:
        _check(variables, rank, size, local_rank, node, on_nodes, len(nodes))
    if not variables.wrong and not env.get("MASTER_ADDR") and not _first_is_first(env, rank, node, len(nodes)):
        variables.problem(
            f"SLURM_DISTRIBUTION={env.get('SLURM_DISTRIBUTION', '')}: rank 0 is not on the first host of "
            f"{env['SLURM_STEP_NODELIST']}, and srun does not say on which; export MASTER_ADDR=HOST"
        )
    variables.check()
    master = env.get("MASTER_ADDR") or (nodes[0] if len(nodes) > 1 else "127.0.0.1")
    return RankInfo(rank, size, local_rank, on_nodes[node], "slurm", master, port)


def located(info: RankInfo, env: Mapping[str, str]) -> RankInfo:
    """Return the rank with an address of rank 0's host that Slurm has, where its name stands for none on this host.

    Where Slurm has none either the name stays, and who looks for it says so.
    """
    name = info.master or ""
    if info.launcher != "slurm" or env.get("MASTER_ADDR") or _is_known(name):
        return info
    found = node_address(_show_node(name))
    if not found and env.get("ENVIRONMENT") == "BATCH" and name in _first(env.get("SLURM_JOB_NODELIST", "")):
        found = env.get("SLURM_LAUNCH_NODE_IPADDR", "")  # of where srun runs: a batch script is on the job's first host
    return replace(info, master=found) if _is_known(found) else info


def node_address(text: str) -> str:
    """Return the address of a node from what `scontrol show node NAME` prints; "" where there is none."""
    match = re.search(r"(?:^|\s)NodeAddr=(\S+)", text)
    return match[1] if match else ""


def _show_node(name: str) -> str:
    with suppress(OSError, subprocess.TimeoutExpired):  # no scontrol here, or a Slurm that does not answer
        command = ["scontrol", "show", "node", name]
        return subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_S, check=False).stdout
    return ""


def _first(nodes: str) -> tuple[str, ...]:
    with suppress(ValueError):
        return hosts(nodes)[:1]
    return ()


def _is_known(host: str) -> bool:
    """Whether a name or an address stands for a host here."""
    with suppress(OSError, UnicodeError):
        return bool(host and socket.getaddrinfo(host, None))
    return False


def command(job: Job) -> list[str]:
    """Return the line for srun, inside of an allocation or with one of its own. One failed task ends all."""
    count = job.processes_per_node
    layout = [f"--nodes={job.nodes}", f"--ntasks={job.processes}", f"--ntasks-per-node={count}"]
    named = [f"--nodelist={','.join(job.hosts)}"] if job.hosts else []
    return ["srun", *layout, *named, "--kill-on-bad-exit=1", *_asked(job), *job.options, *job.program]


def _asked(job: Job) -> list[str]:
    return [f"{option}={value}" for option, value in job.resources.named.items()]


def unused_port(_: Job) -> str:
    """Return why a job has no use for --port."""
    return "it follows from the numbers of job and step, or is MASTER_PORT of the environment"


LAUNCHER: Final = Launcher("slurm", detect, VARIABLES, command, unused_port=unused_port, resources=True, followed=True)


@dataclass(frozen=True)
class Batch:
    """A job for Slurm's queue: `job`, whose options are sbatch's, trains in the run folder `run`.

    Relative names, such as `run` may be, start at `folder`. `time` is as Slurm writes it, or empty for the
    partition's own limit; `warn_before_s` seconds before it is over the ranks are told. `on_again` are further words
    for the case that the folder holds the run already.
    """

    job: Job
    name: str
    folder: str
    run: str
    time: str
    warn_before_s: int
    on_again: tuple[str, ...] = ()

    @property
    def log(self) -> str:
        """Where the job writes, for Slurm, which puts its number for %j; whole, or it looks for % in `folder` too."""
        folder = self.run if self.run.startswith("/") else f"{self.folder}/{self.run}"
        return f"{folder.replace('%', '%%')}/logs/slurm-%j.log"


def checked(batch: Batch) -> Batch:
    """Return the batch, or raise UsageError where Slurm could not do what it says."""
    limit = _seconds(batch.time) if batch.time else None
    problems = []
    if batch.time and limit is None:
        problems.append(f"--time: expected minutes, HH:MM:SS, D-HH or D-HH:MM:SS, got {batch.time}")
    if not 0 < batch.warn_before_s <= _LONGEST_WARNING_S:
        problems.append(f"--warn-before: expected 1 to {_LONGEST_WARNING_S} seconds, got {batch.warn_before_s}")
    elif limit is not None and batch.warn_before_s >= limit:
        problems.append(
            f"--warn-before: {batch.warn_before_s} s before the end is before the start with --time {batch.time}"
        )
    problems += resource_problems(batch.job)
    words = {"--name": batch.name, "run.dir": batch.run, "the current folder": batch.folder}
    words |= batch.job.resources.named
    words |= {f"--option {word!r}": word for word in batch.job.options}
    problems += [
        f"{name}: a line of a batch script has no place for a line break" for name in words if "\n" in words[name]
    ]
    if problems:
        raise UsageError("\n".join(problems))
    return batch


def script(batch: Batch) -> str:
    """Return the batch script, for bash; its comments tell whoever reads it in the run folder why it is so."""
    job = batch.job
    call = shlex.join(command(replace(job, options=(), resources=Resources())))  # a step has what the job has
    run = shlex.quote(batch.run)
    time = f"#SBATCH --time={batch.time}\n" if batch.time else ""
    asked = "".join(f"#SBATCH {shlex.quote(word)}\n" for word in _asked(job))
    options = f"# --option\n#SBATCH {shlex.join(job.options)}\n" if job.options else ""
    again = ""
    if batch.on_again:
        again = _ON_AGAIN.format(run=run, words=shlex.join(batch.on_again))
        call += ' "${words[@]}"'
    return _SCRIPT.format(
        name=shlex.quote(batch.name),
        folder=shlex.quote(batch.folder),
        nodes=job.nodes,
        each=job.processes_per_node,
        time=time,
        asked=asked,
        secret=SECRET,
        log=shlex.quote(batch.log),
        warn=batch.warn_before_s,
        options=options,
        again=again,
        call=call,
        events=shlex.quote(f"{batch.run}/events.jsonl"),
    )


def states(text: str) -> dict[int, tuple[str, str]]:
    """Return the state and the reason of each job from what `squeue --noheader --format=%i|%T|%r` prints."""
    found = {}
    for line in text.splitlines():
        number, _, rest = line.strip().partition("|")
        state, _, reason = rest.partition("|")
        if number.isdecimal() and state:
            found[int(number)] = (state, "" if reason == "None" else reason)
    return found


_SCRIPT: Final = """\
#!/bin/bash
# Written by lockstep submit.
#SBATCH --job-name={name}
#SBATCH --chdir={folder}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={each}
{time}{asked}\
# What Slurm says, and what the ranks print; a start that goes on adds to it.
#SBATCH --output={log}
#SBATCH --open-mode=append
# The ranks, not this script, are told before the time is over (up to a minute earlier: Slurm looks that seldom).
# They finish the step, save and exit with 75.
#SBATCH --signal=USR1@{warn}
# Allows Slurm to start the job again: after a node failed, and where the end of this script asks for it.
#SBATCH --requeue
{options}\

# srun does not take these over from the job by itself, since Slurm 22.05.
if [ -n "${{SLURM_CPUS_PER_TASK:-}}" ]; then export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK; fi
# The ranks sign with it what they tell each other. Drawn at each start, it is in no file and no command line.
if [ -z "${{{secret}:-}}" ]; then {secret}=$(od -An -v -N32 -tx1 /dev/urandom | tr -d ' \n'); fi
export {secret}
{again}\

echo "job $SLURM_JOB_ID, start $((${{SLURM_RESTART_COUNT:-0}} + 1)), on $SLURM_JOB_NODELIST"
said=$(stat --format=%s {events} 2> /dev/null)
# One failed rank ends all. The run folder is named, so that each start goes on in it.
{call}
code=$?

# What this start said last tells whether it was stopped by a signal and is saved. The exit code is 75 then, but for
# ranks that srun kills while they end, because others have ended. A saved run starts again by itself after the
# warning, and where another job takes the nodes (Slurm sends SIGTERM then). Not after scancel, nor where somebody put
# it back into the queue already: it does not count as running then, but asking for a new start would give it one.
reason=
if [ "$code" -ne 0 ] && [ "$(stat --format=%s {events} 2> /dev/null)" != "$said" ]; then
    reason=$(tail -n 1 {events} | sed -n 's/^{{"event": "stopped",.*"reason": "\\([A-Z0-9]*\\)".*/\\1/p')
fi
if [ "$reason" = SIGUSR1 ] || [ "$reason" = SIGTERM ]; then
    # A Slurm that moves many jobs at once may not answer.
    for pause in 0 5 10 20 30; do
        sleep "$pause"
        state=
        read -r state preempted < <(squeue --noheader --jobs="$SLURM_JOB_ID" --Format=State,PreemptTime)
        if [ -z "$state" ]; then continue; fi
        if [ "$state" = RUNNING ] && {{ [ "$reason" = SIGUSR1 ] || [[ $preempted == [0-9]* ]]; }}; then
            echo "stopped by $reason and saved: back into the queue"
            scontrol requeue "$SLURM_JOB_ID" || continue
        fi
        exit "$code"
    done
    echo "stopped by $reason and saved, but Slurm has not put it back into the queue; to go on:"
    echo "scontrol requeue $SLURM_JOB_ID"
fi
exit "$code"
"""
_ON_AGAIN: Final = """\

# The checkpoint to begin from was for the first start.
words=()
if [ -e {run}/config.yaml ]; then words=({words}); fi
"""


def _seconds(time: str) -> int | None:
    """Return the length of Slurm's minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]]."""
    match = _TIME.fullmatch(time)
    if match is None:
        return None
    days, day_hours, day_minutes, day_seconds, hours, minutes, seconds, plain = (
        int(each or 0) for each in match.groups()
    )
    return days * 86_400 + (day_hours + hours) * 3_600 + (day_minutes + minutes + plain) * 60 + day_seconds + seconds


def _is_task_of_many(env: Mapping[str, str]) -> bool:
    step = env.get("SLURM_STEP_ID", "")
    pseudo = step.isdecimal() and int(step) >= _PSEUDO_STEPS
    return bool(step) and not pseudo and "SLURM_PROCID" in env and env.get("SLURM_STEP_NUM_TASKS") != "1"


def _check(
    variables: Variables, rank: int, size: int, local_rank: int, node: int, on_nodes: tuple[int, ...], nodes: int
) -> None:
    """Keep the problems of numbers that do not fit together."""
    check_range(variables, "SLURM_PROCID", rank, "SLURM_STEP_NUM_TASKS", size)
    if not len(on_nodes) == nodes > node or sum(on_nodes) != size:
        variables.problem(
            f"SLURM_STEP_TASKS_PER_NODE says {sum(on_nodes)} tasks on {len(on_nodes)} hosts, "
            f"SLURM_STEP_NUM_TASKS {size}, SLURM_STEP_NODELIST {nodes} hosts, SLURM_NODEID host {node}"
        )
    elif local_rank >= on_nodes[node]:
        variables.problem(f"SLURM_LOCALID={local_rank} with {on_nodes[node]} tasks on host {node}")


def _first_is_first(env: Mapping[str, str], rank: int, node: int, nodes: int) -> bool:
    """Whether rank 0 is on the first host: always so but where the user gave each task its host."""
    arbitrary = env.get("SLURM_DISTRIBUTION", "").startswith("arbitrary")
    return nodes == 1 or not (arbitrary or (rank == 0 and node))
