"""`lockstep doctor gpu`: which cards are here, what is wrong with them, or why none can be used."""

import json
from dataclasses import replace

import pytest
import smi_outputs
from click.testing import CliRunner

from lockstep.cli import main
from lockstep.device import kernel_settings
from lockstep.device.bandwidth import Speed
from lockstep.device.no_card import Evidence
from lockstep.device.nvidia_smi import Driver, links, parse
from lockstep.run import gpu_report

[CARD] = parse(smi_outputs.A5000_590).cards
FIRST, SECOND = replace(CARD, users=()), replace(CARD, users=(), bus="0000:c1:00.0", uuid="GPU-other", uncorrected=2)
GOOD = Evidence(
    torch="2.15.0",
    torch_cuda="13.2",
    kernel="Kernel Module 590.44.01",
    files={"/dev/nvidia0": True, "/dev/nvidiactl": True},
    library="",
    smi="",
    driver_cuda="13.1",
    cards=(FIRST, SECOND),
    visible=None,
    devices=2,
    raised="",
)


@pytest.fixture
def host(monkeypatch):
    """Feign a host; torch numbers its cards the other way round."""

    def feign(evidence: Evidence) -> None:
        device = {"name": "NVIDIA RTX A5000", "bytes": 24 << 30, "capability": "8.6", "processors": 64}
        seen = [device | {"uuid": card.uuid.removeprefix("GPU-")} for card in (SECOND, FIRST)]
        monkeypatch.setattr(gpu_report.cards, "look", lambda: (Driver("590.44.01", "13.1", evidence.cards), evidence))
        monkeypatch.setattr(gpu_report.cards, "devices", lambda: seen)
        monkeypatch.setattr(gpu_report.cards, "peers", lambda: [[True, False], [False, True]])
        monkeypatch.setattr(gpu_report.cards, "connections", lambda count: links(smi_outputs.RTX3090S, count))
        monkeypatch.setattr(kernel_settings, "fix_kernels", lambda threads: None)  # this process has other tests
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        fast, none = Speed("host", "cuda:0", "pinned", 25.13), Speed("cuda:0", "cuda:1", "", None)
        monkeypatch.setattr(gpu_report, "speeds", lambda devices, limit_s: iter([fast, none]))

    return feign


def doctor(*words: str):
    return CliRunner().invoke(main, ("doctor", "gpu", *words))


def test_cards_and_what_is_wrong_with_them(host) -> None:
    host(GOOD)
    found = doctor()
    assert found.exit_code == 0, found.output
    lines = [line.strip() for line in found.stdout.splitlines()]
    for line in (
        "driver  590.44.01, knows CUDA up to 13.1",
        "card 0  NVIDIA RTX A5000  0000:81:00.0  GPU-00000000-0000-0000-0000-000000000003",
        "memory 22,437 of 24,564 MiB in use  PCIe 1.0 x16 of 4.0 x16  ECC off  persistence on  MIG off  mode Default",
        "now 210 of 2,100 MHz  13 C  7 W of at most 230",
        "0    X  NV4",
        "cuda:0  NVIDIA RTX A5000  24.0 GiB  compute capability 8.6  64 multiprocessors  card 1",
        "1   no  yes",
        "host to cuda:0  pinned        25.1",
        "cuda:0 to cuda:1            no time left",
        "warning: card 1 (0000:c1:00.0): 2 uncorrected errors of its memory; do not train on it before it was tested",
    ):
        assert line in lines, found.stdout
    assert "problem" not in found.stdout
    assert "looked at" not in found.stdout


def test_as_json(host) -> None:
    host(GOOD)
    found = json.loads(doctor("--json").stdout)
    assert [card["bus"] for card in found["cards"]] == ["0000:81:00.0", "0000:c1:00.0"]
    assert found["links"] == [["X", "NV4"], ["NV4", "X"]]
    assert found["bandwidth"][0] == {"source": "host", "target": "cuda:0", "way": "pinned", "gb_s": 25.13}
    assert found["problems"] == []


def test_measuring_can_be_left_out(host) -> None:
    host(GOOD)
    assert "copies of" not in doctor("--no-measure").stdout


def test_where_no_card_can_be_used_it_says_why_and_what_was_looked_at(host) -> None:
    closed = {"/dev/nvidia0": False, "/dev/nvidiactl": True}
    host(replace(GOOD, files=closed, devices=0, raised="No CUDA GPUs are available", visible="0"))
    found = doctor()
    assert found.exit_code == 4
    assert "  /dev/nvidia*                 /dev/nvidia0 (closed), /dev/nvidiactl\n" in found.stdout
    assert "  torch.cuda.init()            No CUDA GPUs are available\n" in found.stdout
    problems = [line for line in found.stdout.splitlines() if line.startswith("problem: ")]
    assert problems == [
        "problem: this user may not open /dev/nvidia0; see whose they are (ls -l /dev/nvidia*)",
        "problem: CUDA_VISIBLE_DEVICES=0 names none of the 2 cards here; see nvidia-smi -L",
    ]
    assert "multiprocessors" not in found.stdout


REFUSING = """
from torch import nn
def model(num_classes):
    return nn.Sequential(nn.Conv2d(1, 1, 1), nn.AdaptiveMaxPool2d(3), nn.Flatten(), nn.Linear(9, num_classes))
"""


def test_what_of_a_recipe_has_no_exact_kernel_is_told_without_a_card(run, tmp_path) -> None:
    (tmp_path / "refusing.py").write_text(REFUSING)
    found = run("doctor", "gpu", "--no-measure", "digits", "recipe.model.name=refusing:model", code=2)
    [line] = [line for line in found.out.splitlines() if line.startswith("refused: ")]
    assert "AdaptiveMaxPool2d" in line


def test_a_recipe_that_is_exact(host, tmp_path) -> None:
    host(GOOD)
    found = doctor("--no-measure", "digits")
    assert found.exit_code == 0, found.output
    assert "the recipe's model and loss have exact kernels on CUDA\n" in found.stdout
    assert json.loads(doctor("--no-measure", "--json", "digits").stdout)["refused"] == []


def test_on_this_host(run) -> None:
    """Whatever is here is told, with the exit code that says whether a card can be used."""
    import torch

    found = run("doctor", "gpu", "--no-measure", "--json", code=0 if torch.cuda.device_count() else 4)
    said = json.loads(found.out)
    assert bool(said["problems"]) != bool(said["devices"])
    assert said["libraries"]["torch"] == torch.__version__
