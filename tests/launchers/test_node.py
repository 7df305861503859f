"""Which node this is, as each platform says it, and what is told where it does not."""

from dataclasses import replace

import pytest

from lockstep.common.follow_parent import SECRET_FLAG
from lockstep.common.rank import RankInfo, resolve_rendezvous_address
from lockstep.errors import UsageError
from lockstep.jobs import launch
from lockstep.launchers import detect
from lockstep.launchers.job import PORT, Job
from lockstep.launchers.node import commands, make_node_job

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
    ("env", "asked", "expected"),  # the number of the node, that of all, the first one and its port, processes on each
    [
        (KUBEFLOW, None, (1, 2, "job-node-0-0.job", 29400, 8)),
        (KUBEFLOW | {"PET_NPROC_PER_NODE": "auto"}, None, (1, 2, "job-node-0-0.job", 29400, 1)),
        (KUBEFLOW, 2, (1, 2, "job-node-0-0.job", 29400, 2)),
        (SKYPILOT, None, (1, 3, "10.0.0.7", PORT, 1)),
        (SKYPILOT | {"SKYPILOT_NUM_GPUS_PER_NODE": "4"}, None, (1, 3, "10.0.0.7", PORT, 4)),
        (SKYPILOT | {"SKYPILOT_NUM_GPUS_PER_NODE": "0"}, None, (1, 3, "10.0.0.7", PORT, 1)),
        (SKYPILOT | {"SKYPILOT_NODE_IPS": "fd00::7\nfd00::8"}, None, (1, 3, "fd00::7", PORT, 1)),
        (BATCH, 4, (1, 3, "10.0.0.7", PORT, 4)),
        (BATCH | {"AWS_BATCH_JOB_NODE_INDEX": "0"}, None, (2, 3, "10.0.0.7", PORT, 1)),
        (OURS | {"JOB_COMPLETION_INDEX": "1"}, None, (1, 2, "a-0.a", PORT, 1)),
        (OURS | {"LOCKSTEP_NODE_RANK": "0"}, None, (0, 2, "a-0.a", PORT, 1)),
        ({"LOCKSTEP_NODE_RANK": "0", "LOCKSTEP_NODES": "1"}, 2, (0, 1, "", PORT, 2)),
    ],
)
def test_each_platform_says_which_node_this_is(
    env: dict[str, str], asked: int | None, expected: tuple[int, int, str, int, int]
) -> None:
    placed = make_node_job(JOB, env, asked)
    assert (placed.host_index, placed.nodes, placed.first_address, placed.port, placed.processes_per_node) == expected


def test_a_first_node_that_is_not_told_its_address_has_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "main")
    env = BATCH | {"AWS_BATCH_JOB_NODE_INDEX": "1"}
    del env["AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"]
    assert make_node_job(JOB, env, None).first_address == "main"


@pytest.mark.parametrize(
    ("env", "told"),
    [
        ({}, r"^--on node: the index of this node is not set; .* \(Kubeflow Trainer: PET_NODE_RANK and PET_NNODES; "),
        ({"JOB_COMPLETION_INDEX": "1"}, r"the index of this node is not set"),  # of any indexed Job
        (SKYPILOT | {"SKYPILOT_NODE_IPS": ""}, r"SKYPILOT_NODE_IPS is not set, so node 1 cannot find the first node"),
        (SKYPILOT | {"SKYPILOT_NODE_RANK": "3"}, r"SKYPILOT_NODE_RANK=3 is out of range for SKYPILOT_NUM_NODES=3; "),
        (SKYPILOT | {"SKYPILOT_NUM_NODES": "0"}, r"SKYPILOT_NODE_RANK=1 is out of range for SKYPILOT_NUM_NODES=0"),
        (SKYPILOT | {"SKYPILOT_NODE_RANK": "one"}, r"SKYPILOT_NODE_RANK='one'; expected an integer"),
        (KUBEFLOW | {"PET_MASTER_PORT": ""}, r"PET_MASTER_PORT=''; expected an integer"),
    ],
)
def test_what_does_not_say_it_is_refused(env: dict[str, str], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        make_node_job(JOB, env, None)


def test_a_rank_is_told_its_place_and_finds_it() -> None:
    job = make_node_job(JOB, SKYPILOT | {"SKYPILOT_NODE_IPS": "fd00::7\nfd00::8"}, 2)
    assert [*commands(job)] == ["rank 2", "rank 3"]
    words = commands(job)["rank 3"]
    assert words[:4] == ["/opt/python", "-m", "lockstep.common.follow_parent", "env"]
    assert words[-5:] == ["/opt/python", "-m", "lockstep", "train", "digits"]
    told = dict(word.split("=", 1) for word in words[4:-5])
    found = detect(KUBEFLOW | {"RANK": "7", "WORLD_SIZE": "8"} | told)  # what a job around it has set
    assert found == RankInfo(3, 6, 1, 2, "node", "fd00::7", PORT, restarted_separately=True)
    assert resolve_rendezvous_address(found, "env://") == f"tcp://[fd00::7]:{PORT}"
    assert SECRET_FLAG in commands(replace(job, signed=True))["rank 2"]
    assert commands(replace(job, words=("python", "loop.py", "a")))["rank 2"][-3:] == ["/opt/python", "loop.py", "a"]
    with pytest.raises(UsageError, match=r"^--on node: there is no launcher to pass --tee to; remove --option$"):
        commands(replace(job, options=("--tee",)))


def test_a_first_node_without_an_address_yet_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    answers = iter(["no such host", ""])
    monkeypatch.setattr(launch, "check_host_resolves", lambda host, timeout_s=5.0: next(answers))
    ran = []
    monkeypatch.setattr(launch, "_run_on_hosts", lambda launcher, lines, job, secret: ran.append(lines.keys()) or 0)
    assert launch.start_job("node", make_node_job(JOB, SKYPILOT, None), None, 1, dry_run=False) == 0
    assert capfd.readouterr().err == "waiting for an address of 10.0.0.7, at most 10 minutes\n"
    assert ran == [{"rank 1"}]
    monkeypatch.setattr(launch, "check_host_resolves", lambda host, timeout_s=5.0: "no such host")
    with pytest.raises(
        UsageError, match=r"^no such host; in the environment of the job, set the address of the first node$"
    ):
        launch.start_job("node", make_node_job(JOB, SKYPILOT, None), None, 1, dry_run=False)
