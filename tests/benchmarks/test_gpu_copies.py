from functools import partial

import pytest
import torch
from card import DEVICE, Card

from benchmarks import gpu_copies
from lockstep.core.engine_recipe import PlainRecipe

pytestmark = pytest.mark.slow("the section runs on the CPU; tests/data/test_copies.py has the copies themselves")


def test_no_step_waits_and_bytes_travel_as_bytes() -> None:
    found = gpu_copies.run(torch.device("cpu"), 60.0)
    assert found["ok"], found["failures"]
    assert found["waits"] == 0
    assert found["bytes_per_sample"] == 3 * 16 * 16 + 8 + 3 * 8  # pixels, target, and a place for each channel
    assert "0 waits for the device in 20 steps" in gpu_copies.table(found)[-1]


def test_a_step_that_waits_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_copies, "PlainRecipe", partial(PlainRecipe, nonfinite="skip"))
    found = gpu_copies.run(torch.device("cpu"), 60.0)
    assert not found["ok"]
    assert "a step waits for the device: aten._local_scalar_dense.default" in found["failures"]


def test_on_a_card_the_same_code_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch counts there is not counted here, but by the card."""
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda _: None)
    monkeypatch.setattr(gpu_copies.Size, "of", lambda _: gpu_copies.Size(8, 4, samples=64))
    monkeypatch.setattr(gpu_copies, "_net", lambda _, net=gpu_copies._net: net(torch.device("cpu")))
    with Card() as card:
        found = gpu_copies.run(DEVICE, 60.0)
    assert found["ok"], found["failures"]
    assert not card.races
    assert "| of them hidden |" in "\n".join(gpu_copies.table(found))
