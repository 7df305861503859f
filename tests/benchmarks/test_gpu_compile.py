"""The section of scripts/prove-gpu that compiles: runs that differ are named, and what had no time is listed."""

import shutil

import pytest
import torch

from benchmarks import gpu_compile


@pytest.mark.worlds
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles with g++")
def test_a_resume_elsewhere_has_the_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    placed = {name: gpu_compile.PLACED[name] for name in ("single", "pipeline on 2")}
    monkeypatch.setattr(gpu_compile, "PLACED", placed)
    monkeypatch.setattr(gpu_compile, "_timed", lambda *_: {})
    found = gpu_compile.run(torch.device("cpu"), 800.0)
    assert found["ok"], found["failures"]
    assert [*found["hashes"]] == ["single", gpu_compile.RESUMED, "pipeline on 2"]


def test_runs_that_differ_or_are_missing_are_not_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_compile, "_timed", lambda *_: {"first": {"eager": 0.5}, "step": {"eager": 0.25}})
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    differing = {"single": "a", "ddp on 2": "b"}
    for device, hashes, word in ((cpu, differing, "different weights"), (cuda, {"single": "a"}, "did not do")):
        monkeypatch.setattr(gpu_compile, "_hashes", lambda *_, own=hashes: (own, []))
        found = gpu_compile.run(device, 1.0)
        assert not found["ok"]
        assert word in found["failures"][0]
        assert "| eager | 0.5 | 250.00 | 1.00 x |" in gpu_compile.table(found)
        assert any(line.startswith("No time for: ") for line in gpu_compile.table(found))
