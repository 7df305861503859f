"""The record of a machine, and the fingerprint of its numerics."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from lockstep import __version__
from lockstep.device import machine


def test_the_record_is_json_with_versions_and_devices() -> None:
    record = json.loads(json.dumps(machine.describe_environment(), allow_nan=False))
    assert record["packages"]["torch"] == torch.__version__.split("+")[0]
    assert record["packages"]["lockstep-train"] == __version__
    assert record["cpu"]["cores"] == os.cpu_count()
    assert record["cpu"]["model"]
    assert len(record["gpus"]) == torch.cuda.device_count()


def test_the_record_holds_no_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_TOKEN", "very-secret-value")
    assert "very-secret-value" not in json.dumps(machine.describe_environment())


def test_a_package_that_is_not_installed_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_PACKAGES", ("torch", "no-such-distribution-at-all"))
    assert machine.describe_environment()["packages"]["no-such-distribution-at-all"] is None


def test_the_commit_of_the_working_folder(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(here.parent))
    assert machine.describe_environment()["git"] is None
    author = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run(["git", "init", "-q", "."], check=True)
    subprocess.run(["git", *author, "commit", "-q", "--allow-empty", "-m", "first"], check=True)
    head = subprocess.run(["git", "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert machine.describe_environment()["git"] == {"commit": head, "dirty": False}
    (here / "new").touch()
    assert machine.describe_environment()["git"] == {"commit": head, "dirty": True}


def test_without_git_there_is_no_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.describe_environment()["git"] is None


def test_the_fingerprint_sees_the_number_of_threads() -> None:
    threads = torch.get_num_threads()
    before = machine.make_fingerprint(torch.device("cpu"))
    try:
        torch.set_num_threads(threads + 1)
        now = machine.make_fingerprint(torch.device("cpu"))
    finally:
        torch.set_num_threads(threads)
    assert machine.describe_fingerprint_differences(before, before) == []
    assert machine.describe_fingerprint_differences(before, now) == [f"threads: {threads} before, {threads + 1} now"]


def test_the_fingerprint_survives_json() -> None:
    fingerprint = machine.make_fingerprint(torch.device("cpu"))
    assert json.loads(json.dumps(fingerprint)) == fingerprint
    assert fingerprint["torch"] == torch.__version__
    assert fingerprint["device"] == "cpu"
    assert "host" not in fingerprint


def test_what_one_of_two_lacks_is_a_difference() -> None:
    differences = machine.describe_fingerprint_differences(
        {"cpu": "x", "device": "cpu"}, {"gpu": "y", "device": "cuda"}
    )
    assert differences == [
        "cpu: x before, nothing now",
        "device: cpu before, cuda now",
        "gpu: nothing before, y now",
    ]


def test_the_fingerprint_keeps_variables_that_change_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TIMM_FUSED_ATTN", raising=False)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")  # says nothing on the CPU
    before = machine.make_fingerprint(torch.device("cpu"))
    monkeypatch.setenv("TIMM_FUSED_ATTN", "0")
    now = machine.make_fingerprint(torch.device("cpu"))
    assert machine.describe_fingerprint_differences(before, now) == ["switches: none before, TIMM_FUSED_ATTN=0 now"]


@pytest.mark.slow("needs a card")
@pytest.mark.gpu
def test_the_fingerprint_of_a_gpu_names_it() -> None:
    fingerprint = machine.make_fingerprint(torch.device("cuda", 0))
    assert fingerprint["gpu"] == torch.cuda.get_device_name(0)
    assert "cpu" not in fingerprint
