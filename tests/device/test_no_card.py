"""Why no card can be used is told from what was looked at."""

from dataclasses import replace

import pytest
import smi_outputs

from lockstep.device.no_card import Evidence, reasons
from lockstep.device.nvidia_smi import parse

FILES = {"/dev/nvidia0": True, "/dev/nvidia-uvm": True, "/dev/nvidiactl": True}
[CARD] = parse(smi_outputs.A5000_590).cards
GOOD = Evidence(
    torch="2.15.0",
    torch_cuda="13.2",
    kernel="NVIDIA UNIX x86_64 Kernel Module  590.44.01",
    files=FILES,
    library="",
    smi="",
    driver_cuda="13.1",
    cards=(CARD,),
    visible=None,
    devices=1,
    raised="",
)
NONE = {"devices": 0, "raised": "No CUDA GPUs are available"}
ABSENT = {"kernel": "", "files": {}, "library": "libcuda.so.1: cannot open", "smi": "it cannot be run", "cards": ()}


def test_where_torch_has_a_device_nothing_is_missing() -> None:
    assert reasons(GOOD) == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({**ABSENT, "driver_cuda": ""}, "no driver: neither /proc/driver/nvidia/version nor /dev/nvidia* nor"),
        ({"torch": "2.15.0+cpu", "torch_cuda": None}, "torch 2.15.0+cpu is built without CUDA; install one with CUDA"),
        (
            {"driver_cuda": "12.4"},
            "the driver knows CUDA up to 12.4, and torch 2.15.0 is built with CUDA 13.2; install a ",
        ),
        (
            {"files": {"/dev/nvidiactl": True}},
            "the driver is loaded, but no card has a device file (/dev/nvidia0); in a ",
        ),
        (
            {"library": "libcuda.so.1: no such file"},
            "the driver is loaded, but not its library: libcuda.so.1: no such ",
        ),
        (
            {"smi": "Driver/library version mismatch", "cards": ()},
            "nvidia-smi does not answer: Driver/library version ",
        ),
        ({"files": FILES | {"/dev/nvidia0": False}}, "this user may not open /dev/nvidia0; see whose they are"),
        ({"visible": ""}, "CUDA_VISIBLE_DEVICES is '', which hides all cards; unset it"),
        ({"visible": "-1"}, "CUDA_VISIBLE_DEVICES is '-1', which hides all cards"),
        ({"visible": "7"}, "CUDA_VISIBLE_DEVICES=7 names none of the 1 cards here; see nvidia-smi -L"),
        (
            {"cards": (replace(CARD, mode="Exclusive_Process"),)},
            "all cards are in use exclusively: pid 2921 VLLM::Worker",
        ),
        (
            {"cards": (replace(CARD, mode="Prohibited"),)},
            "all cards are in compute mode Prohibited; nvidia-smi -c DEFAULT",
        ),
        ({}, "CUDA does not start: No CUDA GPUs are available"),
        ({"raised": ""}, "torch finds no card, and nothing of what was looked at says why"),
        # In Windows' Linux the driver is outside: its library is there, and nothing else.
        ({"kernel": "", "files": {}}, "CUDA does not start: No CUDA GPUs are available"),
    ],
)
def test_each_reason(change, reason) -> None:
    [found] = reasons(replace(GOOD, **{**NONE, **change}))
    assert found.startswith(reason)


def test_several_reasons_are_told_together() -> None:
    found = reasons(replace(GOOD, **NONE, torch_cuda=None, visible=""))
    assert [text.split()[0] for text in found] == ["torch", "CUDA_VISIBLE_DEVICES"]


def test_cards_that_are_there_and_do_not_start_are_a_problem() -> None:
    assert reasons(replace(GOOD, raised="out of memory")) == ["CUDA does not start: out of memory"]
