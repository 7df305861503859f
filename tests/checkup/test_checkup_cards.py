"""What was found of the cards is judged: why none can be used, and what is wrong with one."""

import time
from dataclasses import replace
from typing import Any

import pytest

from lockstep.checkup import cards
from lockstep.checkup.cards import make_gpu_findings
from lockstep.checkup.finding import Finding
from lockstep.device.cards import CudaDevice, GpuInfo, NvmlDevice, NvmlResult

FILES = {"/dev/nvidia0": True, "/dev/nvidia-uvm": True, "/dev/nvidiactl": True}
CARD = NvmlDevice(
    name="NVIDIA H100 80GB HBM3",
    uuid="GPU-3",
    bus="0000:1b:00.0",
    memory_mib=81559,
    ecc=True,
    persistence=True,
    power_limit_w=700.0,
    power_default_w=700.0,
    link_width=16,
    link_width_max=16,
)
USED = replace(CARD, users=("pid 7 (python)", "pid 8 (x)"))
GOOD = GpuInfo(
    driver=NvmlResult("590.44.01", "13.1", (CARD,)),
    libraries={"torch": "2.15.0", "CUDA": "13.2", "cuDNN": "9", "NCCL": "2.28"},
    kernel="NVIDIA UNIX x86_64 Kernel Module  590.44.01",
    files=FILES,
    library="",
    visible=None,
    devices=(CudaDevice("NVIDIA H100 80GB HBM3", "3", 80 << 30, "9.0", ()),),
    cuda_error="",
)
NONE = {"devices": (), "cuda_error": "No CUDA GPUs are available"}
ABSENT = {"kernel": "", "files": {}, "library": "libcuda.so.1: cannot open", "driver": NvmlResult(problem="not found")}


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def found(evidence: GpuInfo, level: str) -> list[Finding]:
    return [each for each in make_gpu_findings(evidence, "fp32", None) if each.level == level]


def test_a_host_whose_cards_are_well() -> None:
    texts = {each.check: each.found for each in make_gpu_findings(GOOD, "fp32", [])}
    assert texts == {
        "driver": "590.44.01, supports CUDA up to 13.1",
        "libraries": "torch 2.15.0, CUDA 13.2, cuDNN 9, NCCL 2.28",
        "card 0": "NVIDIA H100 80GB HBM3, 0000:1b:00.0, GPU-3, memory 81,559 MiB, ECC on, persistence on, mode Default",
        "cuda:0": "NVIDIA H100 80GB HBM3, 80.0 GiB, compute capability 9.0, card 0",
        "recipe": "its model and loss have exact kernels on CUDA",
    }
    assert len(found(GOOD, "ok")) == 4


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (ABSENT, "no driver: /proc/driver/nvidia/version, /dev/nvidia* and libcuda.so.1"),
        ({"libraries": GOOD.libraries | {"CUDA": None}}, "torch 2.15.0 is built without CUDA"),
        (
            {"driver": NvmlResult("550", "12.4", (CARD,))},
            "the driver supports CUDA up to 12.4, but torch 2.15.0 is built with CUDA 13.2",
        ),
        ({"files": {"/dev/nvidiactl": True}}, "the driver is loaded, but no GPU has a device file (/dev/nvidia0)"),
        ({"library": "libcuda.so.1: no such"}, "the driver is loaded, but not its library: libcuda.so.1: no such"),
        ({"driver": NvmlResult(problem="version mismatch")}, "the driver does not answer: version mismatch"),
        ({"files": FILES | {"/dev/nvidia0": False}}, "no permission to open /dev/nvidia0"),
        ({"visible": ""}, "CUDA_VISIBLE_DEVICES is '', which hides all GPUs"),
        ({"visible": "-1"}, "CUDA_VISIBLE_DEVICES is '-1', which hides all GPUs"),
        ({"visible": "7"}, "CUDA_VISIBLE_DEVICES=7 names none of the 1 GPUs"),
        (
            {"driver": NvmlResult("590", "13.1", (replace(USED, mode="Exclusive_Process"),))},
            "all GPUs are in exclusive use: pid 7 (python); pid 8 (x)",
        ),
        (
            {"driver": NvmlResult("590", "13.1", (replace(CARD, mode="Prohibited"),))},
            "all GPUs are in compute mode Prohibited",
        ),
        ({}, "CUDA does not start: No CUDA GPUs are available"),
        ({"cuda_error": ""}, "torch finds no GPU, and none of the checks below explains why"),
        # In Windows' Linux the driver is outside: its library is there, and nothing else.
        ({"kernel": "", "files": {}}, "CUDA does not start: No CUDA GPUs are available"),
        ({"devices": GOOD.devices, "cuda_error": "out of memory"}, "CUDA does not start: out of memory"),
    ],
)
def test_each_reason_why_no_card_can_be_used(change: dict[str, Any], reason: str) -> None:
    [problem] = found(replace(GOOD, **{**NONE, **change}), "problem")
    assert problem.found.startswith(reason)
    assert problem.remedy


def test_several_reasons_are_reported_together_with_what_was_looked_at() -> None:
    closed = {"/dev/nvidia0": False, "/dev/nvidiactl": True}
    evidence = replace(GOOD, **NONE, libraries=GOOD.libraries | {"CUDA": None}, files=closed)
    assert [each.found.split()[0] for each in found(evidence, "problem")] == ["torch", "no"]
    looked = {each.check: each.found for each in found(evidence, "ok")}
    assert looked["/dev/nvidia*"] == "/dev/nvidia0 (no permission), /dev/nvidiactl"
    assert looked["torch.cuda.init()"] == "No CUDA GPUs are available"


@pytest.mark.parametrize(
    ("change", "warning"),
    [
        ({"uncorrected": 2}, "2 uncorrected memory errors"),
        ({"uncorrected_ever": 1}, "1 uncorrected memory errors over its lifetime, none since the last start"),
        ({"repair": ("a row that could not be remapped",)}, "a row that could not be remapped"),
        ({"mode": "Prohibited"}, "compute mode Prohibited"),
        ({"users": USED.users}, "in use by pid 7 (python), pid 8 (x)"),
        ({"clock_limits": ("power cap", "heat")}, "its clocks are currently reduced by power cap, heat"),
        ({"mig": True}, "split into MIG slices"),
        ({"link_width": 4}, "PCIe x4 of x16"),
        ({"power_limit_w": 600.0}, "power limit 600 W, its default is 700 W"),
        ({"persistence": False}, "persistence mode is off"),
    ],
)
def test_what_is_wrong_with_a_card(change: dict[str, Any], warning: str) -> None:
    [bad] = found(replace(GOOD, driver=NvmlResult("590", "13.1", (replace(CARD, **change),))), "warning")
    assert (bad.check, bad.found) == ("card 0", warning)
    assert bad.leads_to
    assert bad.remedy


def test_a_card_that_knows_nothing_of_itself_is_not_warned_of() -> None:
    assert (
        found(
            replace(GOOD, driver=NvmlResult("590", "13.1", (NvmlDevice("NVIDIA H100 80GB HBM3", "GPU-3"),))), "warning"
        )
        == []
    )


def test_cards_of_two_kinds() -> None:
    mixed = NvmlResult("590", "13.1", (CARD, replace(CARD, name="NVIDIA A100"), CARD))
    [text] = [each.found for each in found(replace(GOOD, driver=mixed), "warning")]
    assert text == "several kinds: 2 NVIDIA H100 80GB HBM3, 1 NVIDIA A100"


def test_torch_may_number_them_otherwise_and_they_may_not_reach_each_other() -> None:
    two = NvmlResult("590", "13.1", (CARD, replace(CARD, uuid="GPU-4")))
    devices = (replace(GOOD.devices[0], uuid="4", peer_devices=(1,)), GOOD.devices[0])
    texts = {each.check: each.found for each in found(replace(GOOD, driver=two, devices=devices), "ok")}
    assert texts["cuda:0"].endswith(", card 1; peer access to cuda:1")
    assert texts["cuda:1"].endswith(", card 0; no peer access")


@pytest.mark.parametrize(
    ("name", "value", "warning"),
    [
        ("CUBLAS_WORKSPACE_CONFIG", ":0:0", "CUBLAS_WORKSPACE_CONFIG=:0:0: cuBLAS may compute"),
        (
            "NVIDIA_TF32_OVERRIDE",
            "1",
            "recipe.precision: got fp32, but NVIDIA_TF32_OVERRIDE=1 computes float32 products",
        ),
    ],
)
def test_variables_that_break_a_run_are_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, warning: str
) -> None:
    monkeypatch.setenv(name, value)
    [bad] = found(GOOD, "warning")
    assert bad.found.startswith(warning)


def test_a_driver_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cards, "_DRIVER_TIMEOUT_S", 0.01)
    monkeypatch.setattr(cards, "query_nvml", lambda: time.sleep(10))
    assert cards.query_gpus().driver.problem == "no answer within 20 s, so it hangs"
