"""What a placement costs: money by its devices and hours, and how often to save by how often it fails."""

from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.core.order import Steps
from lockstep.planning.costs import CostParameters, compute_kept_fraction, compute_optimal_interval_s, estimate_costs

STEPS = Steps(length=1000, batch=100, drop_last=False, epochs=5)


@pytest.mark.parametrize(("mtbf_min", "expected_min"), [(24 * 60, 117), (6 * 60, 57), (15, 9.1)])
def test_the_interval_is_that_of_the_paper_for_a_save_of_five_minutes(mtbf_min: float, expected_min: float) -> None:
    """Daly (2006), figures 3 to 5."""
    assert compute_optimal_interval_s(300, 60 * mtbf_min) / 60 == pytest.approx(
        expected_min, abs=0.5 if expected_min > 10 else 0.05
    )


@given(st.floats(0.01, 1e4), st.floats(10, 1e6))
def test_no_other_interval_keeps_notably_more(save_s: float, mtbf_s: float) -> None:
    best = compute_optimal_interval_s(save_s, mtbf_s)
    assert 0 < best <= mtbf_s
    if save_s < mtbf_s / 2:
        share = compute_kept_fraction(best, save_s, mtbf_s)
        assert 0 < share < 1
        assert all(
            compute_kept_fraction(best * factor, save_s, mtbf_s) < share * 1.001 for factor in (0.5, 0.8, 1.25, 2.0)
        )


def test_all_is_kept_where_nothing_fails_and_nothing_where_no_save_ends() -> None:
    assert compute_kept_fraction(1000.0, 0.0, 1e12) == pytest.approx(1.0)
    assert compute_kept_fraction(1.0, 1e6, 1.0) == 0.0


def test_devices_cost_by_the_hour_and_saves_fall_on_steps() -> None:
    found = estimate_costs(7.2, 4, STEPS, CostParameters(price_per_hour=2.5, mtbf_s=86400.0, save_s=300.0))
    assert found.epoch == pytest.approx(10 * 4 * 7.2 / 3600 * 2.5)
    assert found.run == pytest.approx(5 * 10 * 4 * 7.2 / 3600 * 2.5)
    assert found.save_every == 972  # 116.7 min
    assert found.kept == pytest.approx(compute_kept_fraction(972 * 7.2, 300.0, 86400.0))
    assert set(asdict(estimate_costs(7.2, 4, STEPS, CostParameters())).values()) == {None}
