"""The section of scripts/prove-gpu that compiles: runs that differ or are missing are named; test_gpu.py runs it."""

import pytest
import torch

from benchmarks import gpu_compile

pytestmark = pytest.mark.slow("other programs, or minutes")


def test_runs_that_differ_or_are_missing_are_not_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_compile, "_timed", lambda *_: {"first": {"eager": 0.5}, "step": {"eager": 0.25}})
    cpu = torch.device("cpu")
    differing = {"single": "a", "ddp on 2": "b"}
    for hashes, word in ((differing, "different weights"), ({"single": "a"}, "did not do")):
        monkeypatch.setattr(gpu_compile, "_hashes", lambda *_, own=hashes: (own, []))
        found = gpu_compile.run(cpu, 1.0)
        assert not found["ok"]
        assert word in found["failures"][0]
        assert "| eager | 0.5 | 250.00 | 1.00 x |" in gpu_compile.table(found)
        assert any(line.startswith("No time for: ") for line in gpu_compile.table(found))
