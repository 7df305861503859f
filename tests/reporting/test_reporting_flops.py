"""FLOP/s and their part of the peak, from what a run reports anyway."""

from dataclasses import replace

import pytest
from event_examples import started, stepped

from lockstep.reporting.flops import add_flops


def test_the_part_of_the_peak() -> None:
    run = replace(started(), flops_per_sample=2_000_000, peak_flops_per_s=1e10)
    seen = add_flops(stepped(), run)
    assert (seen.flops_per_s, seen.mfu) == (pytest.approx(1234.4 * 2e6), pytest.approx(0.24688))
    assert replace(seen, flops_per_s=None, mfu=None) == stepped()


def test_without_a_peak_only_the_speed() -> None:
    seen = add_flops(stepped(), replace(started(), flops_per_sample=2_000_000))
    assert (seen.flops_per_s, seen.mfu) == (pytest.approx(1234.4 * 2e6), None)


def test_where_nothing_is_counted_nothing_is_said() -> None:
    assert add_flops(stepped(), replace(started(), flops_per_sample=None)) == stepped()
