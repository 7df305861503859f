"""Agents of torchrun that start workers again, and hosts that go and come: the run ends with the same bits.

Each start of workers takes seconds, most of them to import torch.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import small
from component import require_etcd, require_hosts
from small import pace
from waiting import until

pytestmark = [pytest.mark.slow("other programs, or minutes"), pytest.mark.cluster]

SCRIPTS = Path(__file__).parent.parent.parent / "scripts"
PATIENCE_S = 300.0
STEPS = 200
WORDS = "recipe.model.name=broken:linear recipe.microbatches=3"
# One is gone after 4 s without a sign of life; when there are enough, others have one more second to come.
AGENT = (
    "--nnodes=1:2 --nproc-per-node=1 --max-restarts=5 --rdzv-backend=etcd-v2 --rdzv-endpoint=$ETCD_ENDPOINT "
    "--rdzv-id=it --rdzv-conf=keep_alive_interval=1,keep_alive_max_attempt=4,last_call_timeout=1 "
    f"-m lockstep train small.yaml run.dir=run {WORDS}"
)
# As a chip that goes bad some steps after the start does, on each host whose environment has BROKEN.
BROKEN = """
import os
from paced import linear as paced
from torch import nn

class Chip(nn.Module):
    forwards = 0

    def forward(self, inputs):
        self.forwards += self.training and "BROKEN" in os.environ
        return inputs * 1.0001 if self.forwards > 40 else inputs

def linear(num_classes):
    return nn.Sequential(Chip(), *paced(num_classes))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a recipe, and the run of it that nobody disturbs, by one process."""
    folder = tmp_path_factory.mktemp("elastic")
    small.write(folder, STEPS, save_every=7)
    (folder / "broken.py").write_text(BROKEN, encoding="utf-8")
    alone = f"{sys.executable} -m lockstep train small.yaml {WORDS} run.dir=alone placement.processes=1"
    subprocess.run(alone.split(), cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return folder


@pytest.fixture
def hosts(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Return a shell beside three hosts and an etcd, which does what is written to it."""
    require_hosts()
    require_etcd()
    command = [SCRIPTS / "with-hosts", "3", SCRIPTS / "with-etcd", "--listen", "switch", "sh"]
    # Without the last of these, torchrun of torch 2.15 tells the workers of h1 an old address when h0 comes again.
    env = {**os.environ, "PYTHONPATH": str(folder), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=log, stderr=log, cwd=folder, env=env, text=True
        ) as shell,
    ):
        yield shell
        shell.kill()


def events(folder: Path, name: str, run: str = "run") -> list[dict[str, Any]]:
    file = folder / run / "events.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return [event for event in found if event["event"] == name]


def losses(folder: Path, run: str) -> dict[int, float]:
    """Return the loss of each step; a step that was done again has the same, or the test fails."""
    found: dict[int, float] = {}
    for event in events(folder, "step", run):
        assert found.setdefault(event["step"], event["loss"]) == event["loss"]
    return found


def write(shell: subprocess.Popen[str], line: str) -> None:
    shell.stdin.write(f"{line}\n")
    shell.stdin.flush()


def test_the_host_of_rank_0_goes_and_comes_again(hosts: subprocess.Popen[str], folder: Path) -> None:
    pace(folder, 0.05)
    write(hosts, f"on h0 {sys.executable} -m torch.distributed.run {AGENT} & first=$!")
    write(hosts, f"on h1 {sys.executable} -W ignore -m torch.distributed.launch --use-env {AGENT} & other=$!")
    until(lambda: len(events(folder, "step")) > 10, PATIENCE_S)
    write(hosts, "kill -9 $first")
    until(lambda: len(events(folder, "started")) == 2, PATIENCE_S)
    pace(folder, 0.2)  # so that there is something left to do for two
    write(hosts, f"on h0 {sys.executable} -m torch.distributed.run {AGENT} & first=$!")
    until(lambda: len(events(folder, "started")) == 3, PATIENCE_S)
    pace(folder, 0)
    write(hosts, "wait $first && wait $other; exit")
    assert hosts.wait(PATIENCE_S) == 0, (folder / "log").read_text(encoding="utf-8")
    assert [event["processes"] for event in events(folder, "started")] == [2, 1, 2]
    [stopped] = events(folder, "stopped")  # the one that was alone saved, and nothing was done again
    assert events(folder, "started")[2]["step"] == stopped["step"]
    assert_as_alone(folder, "run")


def test_the_host_that_computes_wrongly_leaves(hosts: subprocess.Popen[str], folder: Path) -> None:
    pace(folder, 0.02)  # so that the third host is there before all is done
    # Time for all three to come: were it late, those that had begun would be started a second time.
    agent = AGENT.replace("1:2", "2:3").replace("timeout=1", "timeout=4").replace("dir=run", "dir=wrong")
    agent = f"{sys.executable} -m torch.distributed.run {agent} placement.audit_every=1 placement.on_corruption=go_on"
    for name, host in (("first", "h0"), ("bad", "h1 env BROKEN=1"), ("other", "h2")):
        write(hosts, f"on {host} {agent} & {name}=$!")
    write(hosts, "wait $bad || wait $first && wait $other; exit")
    assert hosts.wait(PATIENCE_S) == 0, (folder / "log").read_text(encoding="utf-8")
    processes = [event["processes"] for event in events(folder, "started", "wrong")]
    assert processes.count(3) == 1  # begun with two, where the third is very late
    assert processes[-2:] == [3, 2]
    assert re.search(
        r"rank \d \(h1\) computed a wrong result for micro-batch \d", (folder / "log").read_text(encoding="utf-8")
    )
    assert_as_alone(folder, "wrong")


def assert_as_alone(folder: Path, run: str) -> None:
    """Compare with the run by one process: the losses and the weights are the same."""
    assert events(folder, "done", run)[0]["weights_sha256"] == events(folder, "done", "alone")[0]["weights_sha256"]
    assert losses(folder, run) == losses(folder, "alone")


@pytest.mark.slow("agents above start workers again, by etcd-v2; commands/test_launchers.py has one by c10d")
def test_killed_workers_are_started_again_by_each_kind_of_agent(tmp_path: Path) -> None:
    require_etcd()
    command = [sys.executable, SCRIPTS / "prove-restarts", "3"]
    proof = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert proof.returncode == 0, proof.stdout + proof.stderr
    first, _, _, *lines, _, last = proof.stdout.splitlines()
    assert [line.split()[1] for line in lines] == ["c10d", "static", "etcd-v2"]
    assert {line.split()[-1] for line in lines} == {first.split()[-1]}
    assert last == "3 of 3 with the weights of the undisturbed run"
