"""The line that each launcher starts a job by."""

import shlex
from dataclasses import replace

import pytest

from lockstep.errors import UsageError
from lockstep.launchers import local, openmpi, slurm, ssh, torchrun
from lockstep.launchers.job import Job, Resources, check_job, insert_python

WORDS = ("train", "digits", "recipe.loss={name: a}")
JOB = Job(WORDS, "/opt/python", nodes=2, processes_per_node=4, hosts=("a", "b"), port=29600)
HERE = Job(WORDS, "/opt/python", processes_per_node=4)
LOCKSTEP = "/opt/python -m lockstep train digits 'recipe.loss={name: a}'"
TORCHRUN = "/opt/python -m torch.distributed.run"
SIGNALS = "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
MODULE = f"{SIGNALS} {LOCKSTEP.removeprefix('/opt/python ')}"
FOUR = f"--nproc-per-node=4 {MODULE}"
EIGHT = f"{FOUR} placement.processes=8"
AT_A = "--master-addr=a --master-port=29600"
BOUND = "--map-by ppr:4:node --bind-to none"


@pytest.mark.parametrize(
    ("command", "job", "line"),
    [
        (local.command, HERE, f"{LOCKSTEP} placement.processes=4"),
        (
            torchrun.make_agent_command,
            replace(JOB, min_nodes=1, nodes=3, restarts=9, id="x"),
            f"env TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 {TORCHRUN} --nnodes=1:3 "
            f"--rdzv-backend=c10d --rdzv-endpoint=a:29600 --rdzv-id=x "
            f"--rdzv-conf=last_call_timeout=5 --nproc-per-node=4 --max-restarts=9 {MODULE}",
        ),
        (slurm.command, HERE, f"srun --nodes=1 --ntasks=4 --ntasks-per-node=4 --kill-on-bad-exit=1 {LOCKSTEP}"),
        (
            slurm.command,
            replace(JOB, options=("--gpus-per-task=1",)),
            f"srun --nodes=2 --ntasks=8 --ntasks-per-node=4 --nodelist=a,b --kill-on-bad-exit=1 --gpus-per-task=1 "
            f"{LOCKSTEP}",
        ),
        (
            slurm.command,
            replace(HERE, resources=Resources("gpu", "physics", "a100:4", 8), options=("--exclusive",)),
            f"srun --nodes=1 --ntasks=4 --ntasks-per-node=4 --kill-on-bad-exit=1 --partition=gpu --account=physics "
            f"--gpus-per-node=a100:4 --cpus-per-task=8 --exclusive {LOCKSTEP}",
        ),
        (
            openmpi.command,
            replace(HERE, signed=True),
            f"mpirun -n 4 {BOUND} --host localhost:4 -x LOCKSTEP_JOB_SECRET {LOCKSTEP}",
        ),
        (openmpi.command, HERE, f"mpirun -n 4 {BOUND} --host localhost:4 {LOCKSTEP}"),
        # In an allocation, whose hosts mpirun knows.
        (openmpi.command, replace(JOB, hosts=()), f"mpirun -n 8 {BOUND} {LOCKSTEP}"),
        (
            openmpi.command,
            JOB,
            f"mpirun -n 8 {BOUND} --host a:4,b:4 -x MASTER_ADDR=a -x MASTER_PORT=29600 {LOCKSTEP}",
        ),
    ],
)
def test_lines(command, job, line):
    assert shlex.join(command(job)) == line


@pytest.mark.parametrize(
    ("job", "line"),
    [
        (HERE, f"--standalone {FOUR}"),
        (
            replace(JOB, host_index=1, options=("--monitor-interval=1",)),
            f"--nnodes=2 --node-rank=1 {AT_A} --nproc-per-node=4 {SIGNALS} --monitor-interval=1 "
            f"{LOCKSTEP.removeprefix('/opt/python ')} placement.processes=8",
        ),
        (replace(HERE, restarts=3), f"--standalone --nproc-per-node=4 --max-restarts=3 {MODULE}"),
        (
            replace(HERE, rendezvous="static"),
            f"--nnodes=1 --node-rank=0 --master-addr=localhost --master-port=29513 {FOUR}",
        ),
        (
            replace(HERE, rendezvous="etcd-v2", endpoint="e:2379", id="x"),
            f"--nnodes=1 --rdzv-backend=etcd-v2 --rdzv-endpoint=e:2379 --rdzv-id=x {FOUR}",
        ),
        (
            replace(JOB, hosts=(), endpoint="[fd00::1]:7", host_index=1),
            f"--nnodes=2 --node-rank=1 '--master-addr=[fd00::1]' --master-port=7 {EIGHT}",
        ),
        (replace(JOB, rendezvous="c10d"), f"--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=a:29600 {EIGHT}"),
        (
            replace(JOB, words=("doctor", "launch")),
            f"--nnodes=2 --node-rank=0 {AT_A} --nproc-per-node=4 {SIGNALS} -m lockstep doctor launch",
        ),
    ],
)
def test_lines_of_torchrun(job, line):
    assert shlex.join(torchrun.make_agent_command(job)) == f"{TORCHRUN} {line}"


def test_ssh_ties_what_it_starts_to_itself():
    job = replace(JOB, options=("-p", "2222"))
    words = ssh.commands(replace(job, folder="/data/it's here"))["b"]
    assert words[:1] == ["ssh"]
    assert words[-4:-1] == ["-p", "2222", "b"]
    folder, _, there = words[-1].partition(" && exec ")
    assert shlex.split(folder) == ["cd", "/data/it's here"]
    line = torchrun.make_agent_command(replace(job, host_index=1, options=()))
    assert shlex.split(there) == ["/opt/python", "-m", "lockstep.common.follow_parent", "--knows", "a", *line]
    *_, there = ssh.commands(replace(job, signed=True))["b"]
    assert shlex.split(there)[-len(line) - 4 :] == ["lockstep.common.follow_parent", "--secret", "--knows", "a", *line]
    alone = replace(HERE, hosts=("a",), options=())
    *_, there = ssh.commands(alone)["a"]
    assert "--knows" not in there


@pytest.mark.parametrize(
    ("command", "job", "problem"),
    [
        (local.command, JOB, "only starts processes on this host; use --on ssh, slurm or openmpi"),
        (local.command, replace(HERE, options=("-v",)), "there is no launcher to pass -v to; remove --option"),
        (
            local.command,
            replace(HERE, words=("doctor", "launch")),
            "only starts train, eval and doctor; run lockstep doctor launch directly",
        ),
        (
            torchrun.make_agent_command,
            replace(JOB, hosts=()),
            "2 hosts for torchrun, but no rendezvous endpoint; pass --endpoint HOST:PORT",
        ),
    ],
)
def test_what_a_launcher_cannot_do(command, job, problem):
    with pytest.raises(UsageError, match=problem):
        command(job)


def test_a_job_that_contradicts_itself_is_told_all_at_once():
    with pytest.raises(UsageError) as caught:
        check_job(
            replace(
                JOB,
                words=(),
                nodes=4,
                hosts=("a", "a", "-oProxyCommand=x"),
                endpoint="a",
                rendezvous="etcd-v2",
                resources=Resources(partition="gpu", gpus_per_node="many"),
                options=("--partition=cpu",),
            )
        )
    assert str(caught.value).splitlines() == [
        "no command to start; pass one after --, such as -- train digits",
        "--nodes: got 4, but --hosts names 3 hosts; remove one of the options",
        "--endpoint: expected HOST:PORT, got a",
        "--hosts: listed more than once: a; list each host once, and set --processes-per-node",
        "--hosts: -oProxyCommand=x is not a valid host name; remove it",
        "--gpus-per-node: expected a number such as 4, or a100:4, got many",
        "--partition: also set with --option; remove one of the two",
    ]
    assert check_job(JOB) is JOB


@pytest.mark.parametrize("python", ["/opt/venv/bin/python", "bin/python3.12", "python3.11"])
def test_another_python_before_a_script_is_told_which_to_write(python):
    with pytest.raises(UsageError, match=f"^{python}: processes run with .*; use python train.py --lr 1$"):
        check_job(replace(JOB, words=(python, "train.py", "--lr", "1")))


@pytest.mark.parametrize("command", ["train", "eval"])
def test_a_number_of_processes_that_is_not_the_job_s_is_told(command):
    for asked, told in ((("3",), True), (("4",), False), (("auto",), False), (("3", "4"), False), (("4", "3"), True)):
        job = replace(HERE, words=(command, *(f"placement.processes={each}" for each in asked)))
        if told:
            with pytest.raises(UsageError, match=r"placement\.processes: got 3, but .* start 4; unset"):
                check_job(job)
        else:
            assert check_job(job) is job
    assert check_job(replace(HERE, words=("verify", "placement.processes=3")))
    # The ranks refuse it, or have it.
    assert check_job(replace(JOB, min_nodes=1, words=("train", "placement.processes=3")))


@pytest.mark.parametrize(
    ("job", "problem"),
    [
        (replace(JOB, min_nodes=3), "--nodes: 3:2 has a larger minimum than maximum"),
        (replace(JOB, min_nodes=3, nodes=4), "--nodes: got 3:4, but --hosts names 2 hosts; remove one of the options"),
        (
            replace(JOB, min_nodes=1, rendezvous="static"),
            "--rendezvous: static does not support --nodes MIN:MAX; ",
        ),
        (replace(JOB, rendezvous="etcd-v2"), "--rendezvous: etcd-v2 requires an endpoint; pass --endpoint"),
    ],
)
def test_hosts_that_may_go_and_come_are_checked(job, problem):
    with pytest.raises(UsageError, match=problem):
        check_job(job)
    assert check_job(replace(JOB, min_nodes=2, nodes=3)).rendezvous_backend == "c10d"


def test_a_script_is_started_by_python_itself() -> None:
    words = ("python", "loop.py", "--lr", "1")
    job = Job(words=words, python="py", processes_per_node=2)
    assert torchrun.make_agent_command(job)[-3:] == ["loop.py", "--lr", "1"]
    assert openmpi.command(job)[-4:] == ["py", "loop.py", "--lr", "1"]
    there = openmpi.command(replace(job, nodes=2, hosts=("a", "b")))
    assert there[-6:] == ["-x", "PYTHONHASHSEED", "py", "loop.py", "--lr", "1"]
    assert local.command(job) == ["py", "-m", "lockstep", "launch", "--processes-per-node=2", "--", *words]
    assert openmpi.command(replace(job, words=("python3", *words[1:]))) == openmpi.command(job)
    assert insert_python(words[1:]) == insert_python(words) == words
    assert insert_python(WORDS) == WORDS


@pytest.mark.parametrize("words", [("doctor",), ("doctor", "--json")])
def test_the_check_up_starts_its_processes_itself(words: tuple[str, ...]) -> None:
    assert local.command(Job(words, "py", processes_per_node=2)) == ["py", "-m", "lockstep", *words, "--processes=2"]
