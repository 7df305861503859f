"""What NVML answers is read, whatever a card or an old driver does not know; here by functions in its place."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch

from lockstep.device import cards
from lockstep.device.cards import NvmlDevice, NvmlResult

ANSWERS = {
    "Name": "NVIDIA A100-SXM4-80GB",
    "UUID": "GPU-00000000-0000-0000-0000-000000000002",
    "PciInfo": SimpleNamespace(busId="00000000:9D:00.0"),
    "MemoryInfo": SimpleNamespace(total=80 << 30),
    "ComputeMode": pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS,
    "ComputeRunningProcesses": [SimpleNamespace(pid=2**30)],
    "MigMode": [0, 0],
    "EccMode": [1, 1],
    "PersistenceMode": 1,
    "TotalEccErrors": 3,
    "RemappedRows": (0, 0, 1, 0),
    "RetiredPagesPendingStatus": 0,
    "CurrentClocksEventReasons": pynvml.nvmlClocksEventReasonGpuIdle | pynvml.nvmlClocksEventReasonSwPowerCap,
    "EnforcedPowerLimit": 300_000,
    "PowerManagementDefaultLimit": 400_000,
    "CurrPcieLinkWidth": 8,
    "MaxPcieLinkWidth": 16,
}


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Put functions in the place of NVML's which answer for one card; what is missing here, it does not know."""
    answers = dict(ANSWERS)

    def answer(question: str) -> Any:
        def asked(*_: Any) -> Any:
            if question not in answers:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            return answers[question]

        return asked

    for question in ANSWERS:
        monkeypatch.setattr(pynvml, f"nvmlDeviceGet{question}", answer(question))
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlSystemGetDriverVersion", lambda: "535.54.03")
    monkeypatch.setattr(pynvml, "nvmlSystemGetCudaDriverVersion", lambda: 12020)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 1)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda number: number)
    return answers


def test_the_functions_are_those_of_the_library() -> None:
    assert all(hasattr(pynvml, f"nvmlDeviceGet{question}") for question in ANSWERS)
    assert all(hasattr(pynvml, f"nvmlClocksEventReason{name}") for name in cards._SLOWDOWN_REASONS)


def test_a_card_that_answers_all(nvml: dict[str, Any]) -> None:
    found = NvmlDevice(
        name="NVIDIA A100-SXM4-80GB",
        uuid="GPU-00000000-0000-0000-0000-000000000002",
        bus="0000:9d:00.0",
        memory_mib=81920,
        mode="Exclusive_Process",
        users=(f"pid {2**30} (unknown command)",),
        ecc=True,
        persistence=True,
        uncorrected=3,
        uncorrected_ever=3,
        repair=("rows to be remapped at the next reset",),
        clock_limits=("power cap",),
        power_limit_w=300.0,
        power_default_w=400.0,
        link_width=8,
        link_width_max=16,
    )
    assert cards.query_nvml() == NvmlResult("535.54.03", "12.2", (found,))


def test_a_card_that_knows_little(nvml: dict[str, Any]) -> None:
    for question in ANSWERS.keys() - {"Name", "UUID"}:
        del nvml[question]
    assert cards.query_nvml().cards == (NvmlDevice(ANSWERS["Name"], ANSWERS["UUID"], mode=""),)


def test_a_card_that_fell_off_the_bus(nvml: dict[str, Any]) -> None:
    del nvml["Name"]
    assert cards.query_nvml() == NvmlResult(problem="Not Supported")


def test_without_a_driver_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", missing)
    assert cards.query_nvml() == NvmlResult(problem="NVML Shared Library Not Found")


def test_the_drivers_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    version = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  515.105.01  Fri Apr  7\nGCC version:  gcc 11\n"
    (tmp_path / "proc/driver/nvidia/version").write_text(version)
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidiactl", "nvidia-uvm", "nvidia-caps"):
        (tmp_path / "dev" / name).touch()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    evidence = cards.collect_gpu_info(NvmlResult(), tmp_path)
    assert evidence.kernel == "NVIDIA UNIX x86_64 Kernel Module  515.105.01  Fri Apr  7"
    assert evidence.files == {"/dev/nvidia-uvm": True, "/dev/nvidia0": True, "/dev/nvidiactl": True}
    assert evidence.visible == "0"


def test_a_host_without_a_driver(tmp_path: Path) -> None:
    evidence = cards.collect_gpu_info(NvmlResult(), tmp_path)
    assert (evidence.kernel, evidence.files) == ("", {})
    assert evidence.libraries["torch"] == torch.__version__
    assert bool(evidence.devices) == bool(torch.cuda.device_count())


def test_an_address_as_sysfs_has_it() -> None:
    assert cards.to_sysfs_address("00000000:9D:00.0") == "0000:9d:00.0"
