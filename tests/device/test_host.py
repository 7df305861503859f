"""What a process finds of its host: limits of control groups, variables without secrets, versions."""

import json
import platform

import psutil
import torch

from lockstep.device import host


def test_facts_are_ready_for_json() -> None:
    found = json.loads(json.dumps(host.get_host_info()))
    assert found["versions"]["python"] == platform.python_version()
    assert found["versions"]["torch"] is not None
    assert "pytest" not in found["versions"]
    assert found["numerics"]["torch"] == torch.__version__
    assert "threads" not in found["numerics"]
    assert found.keys() == {"host", "versions", "numerics", "cards", "variables"}


def test_memory_is_that_of_the_host() -> None:
    assert host.get_memory_info()["all"] == psutil.virtual_memory().total


def test_variables_of_libraries_are_shown_and_no_secrets() -> None:
    env = {
        "OMP_NUM_THREADS": "1",
        "NCCL_API_KEY": "x",
        "NCCL_A_TOKEN": "x",
        "HOME": "/root",
        "LOCKSTEP_JOB_SECRET": "x",
        "CUDA_VISIBLE_DEVICES": "",
    }
    assert host.get_env_variables(env) == {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
