"""`lockstep doctor gpu`: its exit codes, and what of a recipe has no exact kernel. checkup/cards.py judges."""

import json
from functools import partial

import pytest
from conftest import invoke

from lockstep.checkup import cards
from lockstep.device.cards import CudaDevice, GpuInfo, NvmlDevice, NvmlResult

pytestmark = pytest.mark.slow("runs whole commands")

CARD = NvmlDevice("NVIDIA RTX A5000", "GPU-3", "0000:81:00.0", uncorrected=2)
GOOD = GpuInfo(
    driver=NvmlResult("590.44.01", "13.1", (CARD,)),
    libraries={"torch": "2.15.0", "CUDA": "13.2"},
    kernel="Kernel Module 590.44.01",
    files={"/dev/nvidia0": True},
    library="",
    visible=None,
    devices=(CudaDevice("NVIDIA RTX A5000", "3", 24 << 30, "8.6", ()),),
    cuda_error="",
)
REFUSING = """
from torch import nn
def model(num_classes):
    return nn.Sequential(nn.Conv2d(1, 1, 1), nn.AdaptiveMaxPool2d(3), nn.Flatten(), nn.Linear(9, num_classes))
"""


@pytest.fixture
def host(monkeypatch) -> None:
    monkeypatch.setattr(cards, "query_gpus", lambda: GOOD)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


doctor = partial(invoke, "doctor", "gpu")


def test_warnings_change_no_exit_code(host) -> None:
    lines = [" ".join(line.split()) for line in doctor().stdout.splitlines()]
    assert "warning card 0 2 uncorrected memory errors" in lines
    assert "ok driver 590.44.01, supports CUDA up to 13.1" in lines
    assert lines[-1] == "1 warning"


def test_what_of_a_recipe_has_no_exact_kernel_is_told_without_a_card(run, tmp_path) -> None:
    (tmp_path / "refusing.py").write_text(REFUSING)
    found = run("doctor", "gpu", "digits", "recipe.model.name=refusing:model", code=2)
    [line] = [line for line in found.out.splitlines() if line.startswith("problem  recipe")]
    assert "AdaptiveMaxPool2d" in line


def test_a_recipe_that_is_exact(host) -> None:
    last = json.loads(doctor("--json", "digits").stdout)["findings"][-1]
    assert (last["level"], last["found"]) == ("ok", "its model and loss have exact kernels on CUDA")


def test_on_this_host(run) -> None:
    """Whatever is here is told, with the exit code that says whether a card can be used."""
    import torch

    usable = torch.cuda.device_count() > 0
    found = json.loads(run("doctor", "gpu", "--json", code=0 if usable else 4).out)
    assert (found["level"] == "problem") != usable
    assert any(torch.__version__ in each["found"] for each in found["findings"])
