"""The section `doctor` of scripts/prove-gpu runs on the CPU, and fails where a card is sick."""

import json
from dataclasses import replace

import pytest
import smi_outputs
import torch

from benchmarks import gpu_doctor
from lockstep.device.nvidia_smi import Driver, parse

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch) -> None:
    monkeypatch.setattr(gpu_doctor, "_MIB_ON_THE_CPU", 1)


def test_it_runs_on_the_cpu() -> None:
    found = json.loads(json.dumps(gpu_doctor.run(CPU, 20.0)))
    assert found["ok"], found["failures"]
    rows = [line for line in gpu_doctor.table(found) if " to " in line]
    assert [row.split("|")[1].strip() for row in rows] == ["host to cpu", "cpu to host", "cpu to cpu"]


def test_what_there_was_no_time_for_is_a_failure() -> None:
    found = gpu_doctor.run(CPU, 0.0)
    assert not found["ok"]
    assert found["failures"][0] == "host to cpu pageable: not measured"
    assert not any(" to " in line for line in gpu_doctor.table(found))


def test_uncorrected_errors_are_a_failure(monkeypatch) -> None:
    [card] = parse(smi_outputs.T4_515).cards
    look = lambda: (Driver("515", "11.7", (replace(card, uncorrected=3),)), None)  # noqa: E731
    monkeypatch.setattr(gpu_doctor.cards, "look", look)
    found = gpu_doctor.run(CPU, 20.0)
    assert found["failures"] == ["Tesla T4 at 0000:00:1e.0: 3 uncorrected errors"]
    assert gpu_doctor.table(found)[0] == "- Tesla T4: 15360 MiB, PCIe 3.0 x8, 70.0 W, ECC on"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.device_count(), reason="needs a CUDA device")
def test_it_runs_on_a_card() -> None:
    found = gpu_doctor.run(torch.device("cuda"), 30.0)
    assert not [text for text in found["failures"] if "not measured" in text]
