"""Copies are measured, each way, within a time."""

import pytest
import torch

from lockstep.device import bandwidth
from lockstep.device.bandwidth import Speed, speeds

CPU = torch.device("cpu")


def test_memory_of_this_host_is_measured() -> None:
    found = list(speeds([CPU], 60.0, mib=1))
    ways = [("host", "cpu", "pageable"), ("cpu", "host", "pageable"), ("cpu", "cpu", "in itself")]
    assert [(each.source, each.target, each.way) for each in found] == ways
    assert all(each.gb_s is not None and 0.01 < each.gb_s < 10_000 for each in found)


def test_bytes_are_counted(monkeypatch) -> None:
    monkeypatch.setattr(bandwidth, "_seconds", lambda copy, device: 0.5)
    assert [each.gb_s for each in speeds([CPU], 60.0, mib=4)] == [4 * 2**20 / 0.5 / 1e9] * 3


def test_the_time_is_kept() -> None:
    assert {each.gb_s for each in speeds([CPU], 0.0, mib=1)} == {None}


def test_all_ways_of_two_cards(monkeypatch) -> None:
    monkeypatch.setattr(bandwidth, "_rate", lambda source, target, pinned, size: 1.0 + pinned)
    found = list(speeds([torch.device("cuda", 0), torch.device("cuda", 1)], 60.0))
    assert found[:5] == [
        Speed("host", "cuda:0", "pinned", 2.0),
        Speed("cuda:0", "host", "pinned", 2.0),
        Speed("host", "cuda:0", "pageable", 1.0),
        Speed("cuda:0", "host", "pageable", 1.0),
        Speed("cuda:0", "cuda:0", "in itself", 1.0),
    ]
    assert found[10:] == [Speed("cuda:0", "cuda:1", "", 1.0), Speed("cuda:1", "cuda:0", "", 1.0)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.device_count(), reason="needs a CUDA device")
def test_a_card_is_measured() -> None:
    assert all(each.gb_s and each.gb_s > 0.1 for each in speeds([torch.device("cuda", 0)], 30.0, mib=64))
