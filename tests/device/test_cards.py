"""Cards are looked for on the host: here with a program in the place of nvidia-smi, and folders as the driver makes."""

from pathlib import Path

import pytest
import smi_outputs
import torch

from lockstep.device import cards
from lockstep.device.no_card import reasons


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """Put a program in the place of nvidia-smi that prints what `-q -x` and `topo -m` did, or does as it is told."""

    def put(body: str = "", xml: str = smi_outputs.T4_515, topology: str = smi_outputs.RTX3090S) -> None:
        (tmp_path / "xml").write_text(xml)
        (tmp_path / "topology").write_text(topology)
        file = tmp_path / "bin" / "nvidia-smi"
        file.parent.mkdir(exist_ok=True)
        case = f'case "$*" in "-q -x") cat {tmp_path}/xml;; "topo -m") cat {tmp_path}/topology;; *) exit 2;; esac'
        file.write_text(f"#!/bin/sh\n{body or case}\n")
        file.chmod(0o755)
        monkeypatch.setenv("PATH", str(file.parent), prepend=":")

    return put


def driver(root: Path) -> Path:
    """Write what a loaded driver leaves in /proc and /dev."""
    (root / "proc/driver/nvidia").mkdir(parents=True)
    version = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  515.105.01  Fri Apr  7\nGCC version:  gcc 11\n"
    (root / "proc/driver/nvidia/version").write_text(version)
    (root / "dev").mkdir()
    for name in ("nvidia0", "nvidiactl", "nvidia-uvm", "nvidia-caps"):
        (root / "dev" / name).touch()
    return root


def test_what_the_driver_says(smi, tmp_path, monkeypatch) -> None:
    smi()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    found, evidence = cards.look(driver(tmp_path))
    assert [card.name for card in found.cards] == ["Tesla T4"]
    assert (found.version, evidence.driver_cuda, evidence.smi, evidence.visible) == ("515.105.01", "11.7", "", "0")
    assert evidence.kernel == "NVIDIA UNIX x86_64 Kernel Module  515.105.01  Fri Apr  7"
    assert evidence.files == {"/dev/nvidia-uvm": True, "/dev/nvidia0": True, "/dev/nvidiactl": True}
    assert evidence.torch_cuda == torch.version.cuda


def test_a_host_without_a_driver(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found, evidence = cards.look(tmp_path)
    assert (found.cards, evidence.kernel, evidence.files) == ((), "", {})
    assert evidence.smi == "it cannot be run: No such file or directory"
    if not torch.cuda.device_count():
        assert evidence.raised
        assert reasons(evidence)


def test_a_program_that_fails_is_quoted(smi) -> None:
    smi("echo 'Failed to initialize NVML: Driver/library version mismatch'; echo 'NVML: 590.44'; exit 18")
    said = "Failed to initialize NVML: Driver/library version mismatch NVML: 590.44 (exit code 18)"
    assert cards.smi("-q", "-x") == ("", said)


def test_a_program_that_hangs_is_given_up(smi, monkeypatch) -> None:
    smi("exec sleep 60")
    monkeypatch.setattr(cards, "_ANSWER_S", 0.2)
    assert cards.smi("-q", "-x") == ("", "none within 0 s; the driver hangs: look for Xid in dmesg")


def test_what_is_no_xml_is_a_problem(smi, tmp_path) -> None:
    smi(xml="No devices were found\n")
    found, evidence = cards.look(tmp_path)
    assert found.cards == ()
    assert evidence.smi.startswith("what it printed is no XML")


def test_links_are_asked_for_where_there_are_two_cards(smi) -> None:
    smi()
    assert cards.connections(2) == [["X", "NV4"], ["NV4", "X"]]
    assert cards.connections(1) == []
    smi("exit 1")
    assert cards.connections(2) == []


def test_versions_of_the_libraries() -> None:
    found = cards.libraries()
    assert found["torch"] == torch.__version__
    assert found["cuda"] == torch.version.cuda
    assert (found["nccl"] is None) == (torch.version.cuda is None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.device_count(), reason="needs a CUDA device")
def test_devices_are_cards() -> None:
    found, evidence = cards.look()
    assert reasons(evidence) == []
    assert {device["uuid"] for device in cards.devices()} <= {card.uuid.removeprefix("GPU-") for card in found.cards}
    assert len(cards.peers()) == torch.cuda.device_count()
