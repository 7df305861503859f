"""`lockstep doctor launch`: what was found, and why."""

import json
import os
import socket
from functools import partial

import pytest
from conftest import invoke
from forked import imported
from waiting import free_port

pytestmark = pytest.mark.slow("runs whole commands")

HYDRA = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}


@pytest.fixture
def free() -> str:
    return str(free_port())


doctor = partial(invoke, "doctor", "launch", "--device", "cpu")


def lines(found) -> list[str]:
    return [" ".join(line.split()) for line in found.stdout.splitlines()]


def test_nobody_started_it():
    found = doctor()
    assert lines(found)[0].startswith("launch of 1 rank on 1 host, ")
    assert "ok torchrun none of its variables is set" in lines(found)
    assert "ok rank no launcher started this process: lockstep train would start its processes itself" in lines(found)
    assert "ok rendezvous not needed by one process" in lines(found)
    assert "ok device cpu: requested" in lines(found)


def test_who_decides_and_why(free):
    found = doctor(**HYDRA, MASTER_PORT=free, SLURM_JOB_ID="7", SLURM_STEP_ID="0")
    shown = " ".join(f"{name}={value}" for name, value in {**HYDRA, "MASTER_PORT": free}.items())
    assert f"ok mpich decides: {shown}" in lines(found)
    assert f"ok slurm SLURM_JOB_ID=7 SLURM_STEP_ID=0 MASTER_PORT={free}" in lines(found)
    assert "ok rank rank 0 of 2, local rank 0 of 2, started by mpich" in lines(found)
    assert f"ok rendezvous 127.0.0.1:{free}, where this rank listens: free" in lines(found)


def test_as_json_in_the_order_in_which_they_are_asked(free):
    found = json.loads(doctor("--json", **HYDRA | {"PMI_RANK": "1"}, MASTER_PORT=free).stdout)
    assert found["level"] == "ok"
    assert found["facts"][0]["decides"] == "mpich"
    assert found["facts"][0]["rank"].items() >= {"rank": 1, "size": 2, "local_rank": 0, "local_size": 2}.items()
    launchers = ["node", "torchrun", "environment", "horovodrun", "openmpi", "mpich", "slurm"]
    assert [each["check"] for each in found["findings"]] == [*launchers, "rank", "rendezvous", "device"]
    texts = {each["check"]: each["found"] for each in found["findings"]}
    assert texts["rank"] == "rank 1 of 2, local rank 0 of 2, started by mpich"
    assert texts["rendezvous"] == f"127.0.0.1:{free}, where rank 0 listens"


def test_a_port_in_use_is_told_with_its_holder():
    with socket.create_server(("127.0.0.1", 0)) as server:
        found = doctor(code=2, **HYDRA, MASTER_PORT=str(server.getsockname()[1]))
    assert f"rank 0 cannot listen there: Address already in use by pid {os.getpid()} (" in " ".join(lines(found))


@pytest.mark.parametrize(
    ("env", "problems"),
    [
        (
            {"PMI_RANK": "x", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"},
            [
                "PMI_RANK=x: expected an integer",
                "PMI_SIZE is not set; mpiexec of MPICH and Intel MPI sets it in each process",
            ],
        ),
        ({"WORLD_SIZE": "2"}, ["RANK is not set; set RANK and WORLD_SIZE"]),
        (
            {**HYDRA, "PMI_SIZE": "4"},
            [
                "rendezvous env://: MASTER_ADDR and MASTER_PORT are not both set; set them (mpiexec does not provide "
                "the host of rank 0: mpiexec -genv MASTER_ADDR HOST ...), or set placement.rendezvous to "
                "tcp://HOST:PORT or file:///PATH"
            ],
        ),
    ],
)
def test_what_is_wrong_is_told(env, problems):
    found = doctor("--json", code=2, **env)
    bad = [each["found"] for each in json.loads(found.stdout)["findings"] if each["level"] == "problem"]
    assert bad == problems


@pytest.mark.parametrize(
    ("rendezvous", "meet"),
    [
        ("file:///tmp/meet", "file:///tmp/meet"),
        ("tcp://127.0.0.1:PORT", "127.0.0.1:PORT, where this rank listens: free"),
    ],
)
def test_another_rendezvous(free, rendezvous, meet):
    found = doctor("--rendezvous", rendezvous.replace("PORT", free), **HYDRA)
    assert f"ok rendezvous {meet.replace('PORT', free)}" in lines(found)


def test_a_place_that_is_none() -> None:
    found = doctor("--json", "--rendezvous", "tcp://localhost", code=2, **HYDRA)
    [problem] = [each["found"] for each in json.loads(found.stdout)["findings"] if each["level"] == "problem"]
    assert problem.startswith("rendezvous tcp://localhost: expected env://, tcp://HOST:PORT or file:///PATH")


def test_under_torchrun_the_agent_listens():
    env = {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "a", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
    env["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    assert "ok rendezvous n1:29500, where torchrun listens" in lines(doctor(**env))


def test_torch_is_not_imported_where_no_device_is_asked_for(tmp_path):
    words = ("doctor", "launch", "--device", "cpu")
    assert "torch" not in imported(*words, folder=tmp_path, **HYDRA, MASTER_PORT="29500")
