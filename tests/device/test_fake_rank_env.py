"""While it lasts, code sees one rank of several; afterwards nothing of it is left."""

import os

import pytest
import torch.distributed as dist

from lockstep.device.fake_rank_env import simulate_rank


def test_whoever_asks_sees_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "7")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with simulate_rank(2, 3):
        assert (dist.get_rank(), dist.get_world_size()) == (2, 3)
        assert (os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"]) == ("2", "2", "3")
    assert not dist.is_initialized()
    assert os.environ["RANK"] == "7"
    assert "WORLD_SIZE" not in os.environ


def test_an_error_ends_it_too() -> None:
    with pytest.raises(ZeroDivisionError), simulate_rank(0, 2):
        raise ZeroDivisionError
    assert not dist.is_initialized()
