"""Which node this is, as each platform says it, and what is told where it does not."""

from dataclasses import replace

import pytest

from lockstep.common.follow_parent import KNOWS, READS_SECRET
from lockstep.errors import UsageError
from lockstep.jobs import launch
from lockstep.launchers.agents import followed
from lockstep.launchers.job import PORT, Job
from lockstep.launchers.node import place

JOB = Job(("train", "digits"), "/opt/python")
SKYPILOT = {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "3", "SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.8\n10.0.0.9\n"}
BATCH = {
    "AWS_BATCH_JOB_NODE_INDEX": "2",
    "AWS_BATCH_JOB_NUM_NODES": "3",
    "AWS_BATCH_JOB_MAIN_NODE_INDEX": "1",
    "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "10.0.0.7",
}
OURS = {"LOCKSTEP_NODES": "2", "LOCKSTEP_FIRST_NODE": "a-0.a"}
KUBEFLOW = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "8",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29400",
}


@pytest.mark.parametrize(
    ("env", "asked", "expected"),  # the number of the node, that of all, where they meet, processes on each
    [
        (KUBEFLOW, None, (1, 2, "job-node-0-0.job:29400", 8)),
        (KUBEFLOW | {"PET_NPROC_PER_NODE": "auto"}, None, (1, 2, "job-node-0-0.job:29400", 1)),
        (KUBEFLOW, 2, (1, 2, "job-node-0-0.job:29400", 2)),
        (SKYPILOT, None, (1, 3, f"10.0.0.7:{PORT}", 1)),
        (SKYPILOT | {"SKYPILOT_NUM_GPUS_PER_NODE": "4"}, None, (1, 3, f"10.0.0.7:{PORT}", 4)),
        (SKYPILOT | {"SKYPILOT_NUM_GPUS_PER_NODE": "0"}, None, (1, 3, f"10.0.0.7:{PORT}", 1)),
        (SKYPILOT | {"SKYPILOT_NODE_IPS": "fd00::7\nfd00::8"}, None, (1, 3, f"[fd00::7]:{PORT}", 1)),
        (BATCH, 4, (1, 3, f"10.0.0.7:{PORT}", 4)),
        (BATCH | {"AWS_BATCH_JOB_NODE_INDEX": "0"}, None, (2, 3, f"10.0.0.7:{PORT}", 1)),
        (OURS | {"JOB_COMPLETION_INDEX": "1"}, None, (1, 2, f"a-0.a:{PORT}", 1)),
        (OURS | {"LOCKSTEP_NODE_RANK": "0"}, None, (0, 2, f"a-0.a:{PORT}", 1)),
        ({"LOCKSTEP_NODE_RANK": "0", "LOCKSTEP_NODES": "1"}, 2, (0, 1, "", 2)),
    ],
)
def test_each_platform_says_which_node_this_is(
    env: dict[str, str], asked: int | None, expected: tuple[int, int, str, int]
) -> None:
    placed = place(JOB, env, asked)
    assert (placed.host, placed.nodes, placed.endpoint, placed.processes_per_node) == expected


def test_a_first_node_that_is_not_told_its_address_has_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "main")
    env = BATCH | {"AWS_BATCH_JOB_NODE_INDEX": "1"}
    del env["AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"]
    assert place(JOB, env, None).endpoint == f"main:{PORT}"


@pytest.mark.parametrize(
    ("env", "told"),
    [
        ({}, r"^--on node: no variables say which node this is \(Kubeflow Trainer: PET_NODE_RANK and PET_NNODES; "),
        ({"JOB_COMPLETION_INDEX": "1"}, r"no variables say which node this is"),  # of any indexed Job
        (SKYPILOT | {"SKYPILOT_NODE_IPS": ""}, r"SKYPILOT_NODE_IPS is not set, and node 1 cannot find the first one"),
        (SKYPILOT | {"SKYPILOT_NODE_RANK": "3"}, r"SKYPILOT_NODE_RANK=3 of SKYPILOT_NUM_NODES=3 nodes, from 0"),
        (SKYPILOT | {"SKYPILOT_NUM_NODES": "0"}, r"SKYPILOT_NODE_RANK=1 of SKYPILOT_NUM_NODES=0 nodes"),
        (SKYPILOT | {"SKYPILOT_NODE_RANK": "one"}, r"SKYPILOT_NODE_RANK='one'; expected a whole number"),
        (KUBEFLOW | {"PET_MASTER_PORT": ""}, r"PET_MASTER_PORT=''; expected a whole number"),
    ],
)
def test_what_does_not_say_it_is_refused(env: dict[str, str], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        place(JOB, env, None)


def test_torchrun_follows_the_command_of_its_node() -> None:
    words = followed(place(JOB, SKYPILOT, 2))
    assert words[:5] == ["/opt/python", "-m", "lockstep.common.follow_parent", KNOWS, "10.0.0.7"]
    assert {"--nnodes=3", "--node-rank=1", "--master-addr=10.0.0.7", "--nproc-per-node=2"} < {*words}
    assert words[-1] == "placement.processes=6"
    assert READS_SECRET in followed(place(replace(JOB, signed=True), SKYPILOT, 2))
    assert READS_SECRET not in words
    assert KNOWS not in followed(place(JOB, {"LOCKSTEP_NODE_RANK": "0", "LOCKSTEP_NODES": "1"}, 2))


def test_a_first_node_without_an_address_yet_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    answers = iter(["no such host", ""])
    monkeypatch.setattr(launch, "host_problem", lambda host, stop_s=5.0: next(answers))
    ran = []
    monkeypatch.setattr(launch, "_on_hosts", lambda lines, job, secret: ran.append(job.host) or 0)
    assert launch.start("node", place(JOB, SKYPILOT, None), None, 1, dry_run=False) == 0
    assert capfd.readouterr().err == "waiting for an address of 10.0.0.7, at most 10 minutes\n"
    assert ran == [1]
    monkeypatch.setattr(launch, "host_problem", lambda host, stop_s=5.0: "no such host")
    with pytest.raises(UsageError, match=r"^no such host$"):
        launch.start("node", place(JOB, SKYPILOT, None), None, 1, dry_run=False)
