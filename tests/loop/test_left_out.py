"""A run that goes on without a rank that is wrong."""

import os
from pathlib import Path

import pytest
import torch

from lockstep.config.load import load
from lockstep.run.training import remove_ranks


@pytest.mark.parametrize(
    ("devices", "seen", "left"), [(3, None, "0,2"), (4, "7,5,6,4", "7,6,4"), (2, None, None), (0, None, None)]
)
def test_the_device_of_the_rank_is_hidden(
    devices: int, seen: str | None, left: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where each rank had one of its own: three ranks on two devices share them."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen or "")
    before = load("digits", ["placement.processes=3", "run.resume=never"])
    after = remove_ranks(before, [1], 3, Path("run")).config
    assert os.environ["CUDA_VISIBLE_DEVICES"] == (left or "")
    assert (after.placement.processes, after.run.dir, after.run.resume) == (2, "run", "auto")
    assert after.recipe == before.config.recipe
