"""The section `doctor` of scripts/prove-gpu runs on the CPU, and fails where a card is sick."""

import pytest
import torch

from benchmarks import gpu_doctor
from lockstep.device.cards import NvmlDevice, NvmlResult

pytestmark = pytest.mark.slow("the section runs on the CPU; tests/device has what it measures")

CPU = torch.device("cpu")


def test_uncorrected_errors_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    sick = NvmlDevice("Tesla T4", "GPU-1", "0000:00:1e.0", uncorrected=3)
    monkeypatch.setattr("lockstep.checkup.cards.query_nvml", lambda: NvmlResult("515", "11.7", (sick,)))
    found = gpu_doctor.run(torch.device("cuda"), 20.0)
    assert found["failures"] == ["Tesla T4 at 0000:00:1e.0: 3 uncorrected errors"]
    assert "| card 0 | warning | 3 uncorrected memory errors |" in gpu_doctor.table(found)


@pytest.mark.gpu
def test_it_runs_on_a_card() -> None:
    found = gpu_doctor.run(torch.device("cuda"), 30.0)
    assert {device["uuid"] for device in found["devices"]} <= {
        card["uuid"].removeprefix("GPU-") for card in found["driver"]["cards"]
    }
