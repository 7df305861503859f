"""Bytes in use are counted whoever holds them, and the most of them though it is over."""

import gc
import time

import pytest
import torch

from lockstep.device.live_bytes import LiveByteCounter

MIB = 2**20


def test_what_is_in_use_is_counted_and_what_is_freed_is_not() -> None:
    gc.collect()  # what other tests left
    live = LiveByteCounter()
    kept = torch.ones(8 * MIB, dtype=torch.uint8)
    freed = torch.ones(16 * MIB, dtype=torch.uint8)
    assert live.measure() == pytest.approx(24 * MIB, rel=0.02)
    del freed
    assert live.measure() == pytest.approx(kept.nbytes, rel=0.02)


def test_a_peak_is_seen_though_it_is_over() -> None:
    live = LiveByteCounter()

    def work() -> None:
        torch.ones(32 * MIB, dtype=torch.uint8)
        passing = torch.ones(64 * MIB, dtype=torch.uint8)
        time.sleep(0.05)
        del passing

    assert live.measure_peak(work) == pytest.approx(64 * MIB, rel=0.02)
    assert live.measure() < MIB
