import pytest
import torch

from benchmarks import gpu_memory
from benchmarks.gpu_memory import Case

pytestmark = pytest.mark.slow("the section runs on the CPU; test_strategies_memory.py has theory and counting")


def test_memory_is_theorys() -> None:
    found = gpu_memory.run(torch.device("cpu"), 300.0)
    assert found["ok"], found["failures"]
    assert len(found["cases"]) == len(gpu_memory.CASES)
    assert len(gpu_memory.table(found)) == 2 + len(gpu_memory.CASES) + 2


def test_theory_counts_copies() -> None:
    assert (Case("sgd").between, Case("sgd").most) == (2, 3)
    assert (Case("adamw").between, Case("adamw").most) == (3, 5)
    assert Case("adamw", microbatches=8, ema=True).most == 1 + 2 + 1 + 4


def test_what_departs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_memory, "CASES", (Case("adamw"),))
    monkeypatch.setattr(gpu_memory, "_STATE", {"sgd": 1, "adamw": 1})
    found = gpu_memory.run(torch.device("cpu"), 300.0)
    assert [each.partition(": ")[0] for each in found["failures"]] == ["adamw, fp32, between", "adamw, fp32, most"]
