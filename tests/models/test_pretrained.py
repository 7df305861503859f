"""Pretrained weights: one process fetches, misfits are named, a missing network is the user's to mend."""

import fcntl
import tempfile
import urllib.error
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchvision import models
from torchvision.models import WeightsEnum

from lockstep.errors import UsageError
from lockstep.models.find import build_model
from lockstep.models.pretrained import lock_download
from lockstep.tasks.dataset_properties import make_dataset_info


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def _torchvision(classes: int) -> nn.Module:
    return build_model(
        name="shufflenet_v2_x0_5",
        source="torchvision",
        pretrained=True,
        dataset_info=make_dataset_info([*map(str, range(classes))], (3, 32, 32)),
    )


@pytest.fixture
def weights(monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """Let torchvision's weights be those of a model made here."""
    torch.manual_seed(1)
    state: dict[str, torch.Tensor] = models.get_model("shufflenet_v2_x0_5").state_dict()

    def get_state_dict(self: WeightsEnum, *_: object, **__: object) -> dict[str, torch.Tensor]:
        return state

    monkeypatch.setattr(WeightsEnum, "get_state_dict", get_state_dict)
    return state


def test_all_weights_for_the_same_classes(weights: dict[str, torch.Tensor]) -> None:
    found = _torchvision(1000).state_dict()
    assert all(torch.equal(found[name], weights[name]) for name in weights)


def test_all_but_the_head_for_other_classes(weights: dict[str, torch.Tensor]) -> None:
    with pytest.warns(UserWarning, match=r"no pretrained weights match fc\.weight, fc\.bias, which are initialized"):
        found = _torchvision(10).state_dict()
    assert found["fc.weight"].shape == (10, 1024)
    same = {name for name in weights if torch.equal(found[name], weights[name])}
    assert set(weights) - same == {"fc.weight", "fc.bias"}


def test_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def get_state_dict(self: WeightsEnum, *_: object, **__: object) -> dict[str, Any]:
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr(WeightsEnum, "get_state_dict", get_state_dict)
    with pytest.raises(UsageError, match=r"cannot fetch .*: .*no route to host.*pretrained=false"):
        _torchvision(10)


def test_a_cause_from_the_network_counts() -> None:
    deep = RuntimeError("deep")
    deep.__cause__ = ConnectionError("cut")
    with pytest.raises(UsageError, match="cannot fetch the pretrained weights: deep"), lock_download("m"):
        raise deep


def test_other_errors_are_left_alone() -> None:
    with pytest.raises(KeyError), lock_download("m"):
        raise KeyError("fc.weight")


def test_no_such_weights_are_said_by_timm() -> None:
    with pytest.raises(UsageError, match="No pretrained weights exist"):
        build_model(
            name="efficientnet_b0_gn",
            source="timm",
            pretrained=True,
            dataset_info=make_dataset_info([*map(str, range(10))], (3, 32, 32)),
        )


def test_other_processes_wait(tmp_path: Path) -> None:
    with lock_download("m"):
        [lock] = tmp_path.glob("*/pretrained.lock")
        with lock.open("ab") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
