"""A recipe that would not be exact on CUDA is refused before a run there, and trains on the CPU."""

from pathlib import Path

import pytest
import torch

from lockstep.config.load import load
from lockstep.errors import UsageError
from lockstep.run.build import setup
from lockstep.run.checks import check_kernels, refused_on_cuda

MODEL = """
from torch import nn

def pooled(num_classes):
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(64, num_classes))
"""


@pytest.fixture
def pooled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "its_pools.py").write_text(MODEL)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "recipe.model.name=its_pools:pooled"


def test_it_is_refused_on_cuda_alone(pooled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "PYTORCH_TUNABLEOP_ENABLED"):
        monkeypatch.delenv(name, raising=False)
    config = load("digits", [pooled]).config
    ready = setup(config.recipe)
    check_kernels(config.placement, ready)  # there is no card
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UsageError, match=r"its_pools:pooled: on CUDA .*\n  1 \(AdaptiveAvgPool2d\) uses .*backward"):
        check_kernels(config.placement, ready)
    check_kernels(load("digits", [pooled, "placement.device=cpu"]).config.placement, ready)


def test_a_variable_that_breaks_the_precision_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load("digits", []).config
    ready = setup(config.recipe)
    assert refused_on_cuda(ready) == []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    with pytest.raises(UsageError, match="NVIDIA_TF32_OVERRIDE"):
        check_kernels(config.placement, ready)
