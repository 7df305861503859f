"""What a process finds of its host: limits of control groups, variables without secrets, versions."""

import json
import os
import platform
from pathlib import Path

import psutil
import pytest
import torch

from lockstep.device import host


def test_facts_are_ready_for_json() -> None:
    found = json.loads(json.dumps(host.facts()))
    assert found["versions"]["python"] == platform.python_version()
    assert found["versions"]["torch"] is not None
    assert "pytest" not in found["versions"]
    assert found["numerics"]["torch"] == torch.__version__
    assert "threads" not in found["numerics"]
    assert 1 <= found["cores"]["usable"] <= found["cores"]["all"] == os.cpu_count()
    assert found["memory"]["all"] == psutil.virtual_memory().total
    assert found["limits"].keys() == {"files", "processes", "locked_bytes", "fabric"}


def test_variables_of_libraries_are_shown_and_no_secrets() -> None:
    env = {
        "OMP_NUM_THREADS": "1",
        "NCCL_API_KEY": "x",
        "NCCL_A_TOKEN": "x",
        "HOME": "/root",
        "LOCKSTEP_JOB_SECRET": "x",
        "CUDA_VISIBLE_DEVICES": "",
    }
    assert host.variables(env) == {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(("text", "cores"), [("150000 100000", 1.5), ("max 100000", None), ("", None)])
def test_the_cores_that_a_container_allows(tmp_path: Path, text: str, cores: float | None) -> None:
    own = group(tmp_path, "0::/a/b")
    (tmp_path / "a" / "cpu.max").write_text(text, encoding="utf-8")
    (tmp_path / "a" / "b" / "cpu.max").write_text("400000 100000", encoding="utf-8")
    assert host.quota_cores(tmp_path, own) == (cores or 4.0)  # the tighter one holds
    assert host.quota_cores(tmp_path / "none", own) is None


def test_the_memory_that_a_container_allows(tmp_path: Path) -> None:
    own = group(tmp_path, "0::/a/b")
    (tmp_path / "a" / "b" / "memory.max").write_text("max", encoding="utf-8")
    assert host.limit_bytes(tmp_path, own) is None
    (tmp_path / "a" / "memory.max").write_text("1048576", encoding="utf-8")
    assert host.limit_bytes(tmp_path, own) == 1 << 20


def test_control_groups_of_version_1(tmp_path: Path) -> None:
    own = group(tmp_path, "4:cpu,cpuacct:/x\n3:memory:/x\n")
    for name in ("cpu", "memory"):
        (tmp_path / name / "x").mkdir(parents=True)
    (tmp_path / "cpu" / "x" / "cpu.cfs_quota_us").write_text("50000\n", encoding="utf-8")
    (tmp_path / "cpu" / "x" / "cpu.cfs_period_us").write_text("100000\n", encoding="utf-8")
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n", encoding="utf-8")
    (tmp_path / "memory" / "x" / "memory.limit_in_bytes").write_text("9223372036854771712\n", encoding="utf-8")
    assert host.quota_cores(tmp_path, own) == 0.5
    assert host.limit_bytes(tmp_path, own) is None


def group(root: Path, text: str) -> Path:
    (root / "a" / "b").mkdir(parents=True)
    (root / "own").write_text(text, encoding="utf-8")
    return root / "own"
