"""`lockstep launch`: the line that it prints is the line that it runs."""

import os
import re
import shlex
import sys
from functools import partial

import pytest
from conftest import invoke, put

from lockstep.common import follow_parent

pytestmark = pytest.mark.slow("runs whole commands")

# Stands in for a launcher on this machine: what follows its options is run as if the launcher had started it once.
STANDS_IN = """#!/bin/sh
echo "$(basename "$0") $*" >> calls
"""
# Runs the line on "another host", whose name is the word before it, as sshd's shell does.
SSH = """#!/bin/sh
while [ $# -gt 2 ]; do shift; done
echo "$1" >> hosts
exec sh -c "$2"
"""

SIGNALS = "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"


launch = partial(invoke, "launch")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("ray", "Ray starts its own workers; call lockstep.ray.train, or lockstep.join in train_loop_per_worker"),
        ("kubernetes", "use lockstep submit --on kubernetes"),
        ("slrum", "no launcher 'slrum'; did you mean 'slurm'?"),
    ],
)
def test_what_is_no_launcher_names_the_way_it_is_used(name: str, told: str) -> None:
    assert told in launch("--on", name, "train", "digits", code=2).output


def test_a_dry_run_prints_the_line_and_nothing_else(programs):
    put(programs, "srun", STANDS_IN)
    asked = ("--partition", "gpu", "--account", "physics", "--gpus-per-node", "2", "--cpus-per-task", "8")
    words = ("--nodes", "2", "--dry-run", "--python", "py", "--", "train", "digits", "recipe.loss={label_smoothing: 0}")
    found = launch("--on", "slurm", *asked, *words)
    assert found.stdout == (
        "srun --nodes=2 --ntasks=4 --ntasks-per-node=2 --kill-on-bad-exit=1 --partition=gpu --account=physics "
        "--gpus-per-node=2 --cpus-per-task=8 py -m lockstep train digits 'recipe.loss={label_smoothing: 0}'\n"
    )
    assert found.stderr == ""
    assert not (programs / "calls").exists()


def test_as_many_ranks_may_start_as_have_work(programs):
    asked = ("--on", "slurm", "--nodes", "4", "--processes-per-node", "8", "--dry-run", "--", "train")
    launch(*asked, "imagenet-resnet18", "recipe.microbatches=32")


def test_the_process_becomes_the_launcher(programs, monkeypatch):
    put(programs, "srun", STANDS_IN)
    became = []
    monkeypatch.setattr(os, "execvpe", lambda program, line, env: became.append((program, line, env)))
    words = ("--on", "slurm", "--processes-per-node", "3", "--option", "--exclusive", "--", "train", "digits")
    launch(*words)
    line = launch(*words[:2], "--dry-run", *words[2:]).stdout
    assert became[0][:2] == ("srun", shlex.split(line))
    assert became[0][1][-5:] == [sys.executable, "-m", "lockstep", "train", "digits"]
    assert became[0][2].keys() - os.environ.keys() == {"LOCKSTEP_SRUN_PORT", "LOCKSTEP_JOB_SECRET"}


@pytest.mark.parametrize(
    ("words", "drawn"),
    [
        (("--on", "torchrun"), True),
        (("--on", "openmpi"), True),
        (("--on", "slurm", "--nodes", "2"), True),
        (("--on", "local"), False),  # nobody else reaches where its processes meet
        (
            ("--on", "torchrun", "--nodes", "2", "--node-rank", "0", "--endpoint", "localhost:1"),
            False,
        ),  # other lines do not know it
        (("--on", "torchrun", "--nodes", "1:2", "--endpoint", "localhost:1", "--id", "a"), False),
    ],
)
def test_ranks_get_a_secret_in_their_environment_and_nowhere_else(programs, monkeypatch, words, drawn):
    for name in ("srun", "mpirun"):
        put(programs, name, STANDS_IN)
    became = []
    monkeypatch.setattr(os, "execvpe", lambda program, line, env: became.append((line, env)))
    for _ in range(2):
        launch(*words, "--", "train", "digits", "run.dir=a")
    secrets = [env.get("LOCKSTEP_JOB_SECRET") for _, env in became]
    assert all(re.fullmatch("[0-9a-f]{64}", each) for each in secrets) if drawn else secrets == [None, None]
    assert not drawn or secrets[0] != secrets[1]
    assert not any(str(secret) in word for secret, (line, _) in zip(secrets, became, strict=True) for word in line)
    monkeypatch.setenv("LOCKSTEP_JOB_SECRET", "of my own choosing")
    launch(*words, "--", "train", "digits", "run.dir=a")
    assert became[-1][1]["LOCKSTEP_JOB_SECRET"] == "of my own choosing"
    monkeypatch.setenv("LOCKSTEP_JOB_SECRET", "short")
    refused = launch(*words, "--", "train", "digits", "run.dir=a", code=2)
    assert "expected 16 to 4096 bytes, got 5" in refused.stderr


def test_ssh_brings_the_secret_by_stdin(programs):
    put(programs, "ssh", '#!/bin/sh\necho "$*" >> lines; head -n 1 >> secrets\n')
    (programs / "hosts.txt").write_text("a\nb\n", encoding="utf-8")
    launch("--on", "ssh", "--hosts", "hosts.txt", "--", "train", "digits")
    one, other = (programs / "secrets").read_text(encoding="utf-8").splitlines()
    assert one == other
    assert re.fullmatch("[0-9a-f]{64}", one)
    lines = (programs / "lines").read_text(encoding="utf-8")
    assert one not in lines
    assert lines.count("-m lockstep.common.follow_parent --secret ") == 2


def test_a_name_that_stands_for_no_address_ends_it_in_seconds(programs, monkeypatch):
    """torchrun would look for it for ten minutes."""
    monkeypatch.setattr(
        "lockstep.jobs.launch.check_host_resolves", lambda host: follow_parent.check_host_resolves(host, 0.1)
    )
    words = ("--nodes", "2", "--node-rank", "1", "--endpoint", "no.such.host.invalid:1", "--", "train", "digits")
    found = launch("--on", "torchrun", *words, code=2)
    assert " cannot resolve host no.such.host.invalid, the rendezvous host of the job (" in found.stderr
    assert "); pass its address in --endpoint ADDRESS:PORT" in found.stderr


def test_a_port_that_is_used_is_taken(programs):
    (programs / "hosts.txt").write_text("a\nb\n", encoding="utf-8")
    for on in ("ssh", "openmpi"):
        words = ("--on", on, "--hosts", "hosts.txt", "--dry-run", "--", "train", "digits")
        assert "29513" in launch(*words).stdout
        assert "29600" in launch("--port", "29600", *words).stdout


def test_ssh_starts_a_torchrun_on_each_host(programs):
    put(programs, "ssh", SSH)
    put(programs, "python", '#!/bin/sh\necho "$*" >> calls\n')
    (programs / "hosts.txt").write_text("# the two\nlocalhost  gpus=8\n\nb\n", encoding="utf-8")
    found = launch("--on", "ssh", "--hosts", "hosts.txt", "--python", f"{programs}/bin/python", "--", "train", "digits")
    assert (found.stdout, found.stderr) == ("", "")
    assert sorted((programs / "hosts").read_text(encoding="utf-8").split()) == ["b", "localhost"]
    calls = sorted((programs / "calls").read_text(encoding="utf-8").splitlines())
    assert len(calls) == 2
    for number, call in enumerate(calls):
        assert call == (
            f"-m lockstep.common.follow_parent --secret --knows localhost "
            f"{programs}/bin/python -m torch.distributed.run --nnodes=2 "
            f"--node-rank={number} "
            f"--master-addr=localhost --master-port=29513 --nproc-per-node=1 {SIGNALS} -m lockstep train digits "
            f"placement.processes=2"
        )


def test_hosts_that_may_go_and_come_get_one_name_for_their_meeting(programs):
    (programs / "hosts.txt").write_text("a\nb\n", encoding="utf-8")
    words = ("--on", "ssh", "--hosts", "hosts.txt", "--nodes", "1:3", "--dry-run", "--", "train", "digits", "run.dir=a")
    lines = launch(*words).stdout.splitlines()
    assert len(lines) == 2
    names = {re.search("--rdzv-id=([0-9a-f]{12}) ", line).group(1) for line in lines}
    assert len(names) == 1
    assert all("--nnodes=1:3 --rdzv-backend=c10d --rdzv-endpoint=a:29513 " in line for line in lines)
    assert all("--max-restarts=10 " in line for line in lines)
    assert names.isdisjoint(re.findall("--rdzv-id=([0-9a-f]{12}) ", launch(*words).stdout))
    assert "--rdzv-id=mine --rdzv-conf=" in launch("--id", "mine", "--restarts", "0", *words).stdout


def test_a_host_that_may_go_does_not_end_the_others(programs):
    after_b = 'until [ -s b ] && ! kill -0 "$(cat b)" 2> /dev/null; do sleep 0.01; done'
    put(programs, "ssh", f'#!/bin/sh\ncase "$*" in *" a cd "*) {after_b};; *) echo $$ > b; exit 7;; esac\n')
    (programs / "hosts.txt").write_text("a\nb\n", encoding="utf-8")
    found = launch("--on", "ssh", "--hosts", "hosts.txt", "--nodes", "1:2", "--", "train", "digits", "run.dir=a")
    assert found.stderr == "b ended with exit code 7; continuing with a\n"


def test_one_host_that_meets_at_an_etcd_gets_a_name_too(programs):
    words = ("--on", "torchrun", "--rendezvous", "etcd-v2", "--endpoint", "e:1", "--dry-run", "--", "train", "digits")
    assert re.search("--rdzv-endpoint=e:1 --rdzv-id=[0-9a-f]{12} --nproc", launch(*words).stdout)


@pytest.mark.parametrize("on", ["slurm", "openmpi", "ssh"])
def test_a_launcher_that_is_not_here_is_told(programs, monkeypatch, on):
    monkeypatch.setenv("PATH", f"{programs}/bin")
    (programs / "hosts.txt").write_text("a\n", encoding="utf-8")
    refused = launch("--on", on, "--hosts", "hosts.txt", "--", "train", "digits", code=2)
    assert " not found; " in refused.stderr
