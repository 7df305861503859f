"""The learning rate: the golden numbers, and what must hold for every schedule."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.core.rate import RateSchedule, scale_rate

SAMPLES = 1_281_167


def imagenet(each="epoch", **changes):
    settings = {"base": 0.2, "samples_per_epoch": SAMPLES, "epochs": 100.0, "curve": "cosine", "update_interval": each}
    return RateSchedule(**settings | {"warmup_epochs": 5.0} | changes)


@pytest.mark.parametrize("each", ["epoch", "step"])
@pytest.mark.parametrize(
    ("epoch", "expected"),
    [(0, ".020000"), (1, ".055986"), (5, ".198769"), (10, ".195106"), (50, ".100000"), (99, ".000049")],
)
def test_cosine_after_warm_up_at_the_start_of_an_epoch(each, epoch, expected):
    assert f"{imagenet(each).compute_rate(epoch * SAMPLES):.6f}" == f"0{expected}"


def test_a_rate_for_each_epoch_stays_the_same_inside_it():
    rate = imagenet("epoch")
    assert rate.compute_rate(7 * SAMPLES) == rate.compute_rate(8 * SAMPLES - 1) != rate.compute_rate(8 * SAMPLES)


def test_a_rate_for_each_step_moves_inside_an_epoch():
    rate = imagenet("step")
    assert rate.compute_rate(7 * SAMPLES) > rate.compute_rate(7 * SAMPLES + 256)


def test_linear_and_polynomial_of_power_one_are_the_same_line():
    linear = RateSchedule(1.0, 100, 10.0, "linear", minimum=0.1)
    power = RateSchedule(1.0, 100, 10.0, "polynomial", minimum=0.1)
    assert [linear.compute_rate(seen) for seen in (0, 500, 1000)] == pytest.approx([1.0, 0.55, 0.1])
    assert [power.compute_rate(seen) for seen in (0, 500, 1000)] == pytest.approx([1.0, 0.55, 0.1])


def test_polynomial_bends_by_its_power():
    assert RateSchedule(1.0, 100, 10.0, "polynomial", power=2.0).compute_rate(500) == pytest.approx(0.25)


def test_steps_multiply_by_gamma_from_each_milestone_on():
    rate = RateSchedule(1.0, 100, 10.0, "steps", milestones=(3.0, 6.0), gamma=0.1)
    assert [rate.compute_rate(seen) for seen in (299, 300, 599, 600)] == pytest.approx([1.0, 0.1, 0.1, 0.01])


def test_constant_is_constant():
    assert {RateSchedule(0.3, 100, 2.0).compute_rate(seen) for seen in range(0, 200, 7)} == {0.3}


curves = st.sampled_from(["cosine", "linear", "polynomial", "constant"])


@given(
    curve=curves,
    seen=st.integers(0, 20_000),
    base=st.floats(1e-4, 10),
    warmup=st.floats(0, 50),
    each=st.sampled_from(["step", "epoch"]),
)
def test_a_rate_lies_between_the_smallest_it_may_be_and_the_base(curve, seen, base, warmup, each):
    minimum = base / 10
    rate = RateSchedule(
        base, 100, 100.0, curve, minimum=minimum, warmup_epochs=warmup, warmup_factor=0.1, update_interval=each
    )
    assert minimum * 0.1 * (1 - 1e-12) <= rate.compute_rate(seen) <= base * (1 + 1e-12)


@given(curve=curves, first=st.integers(0, 10_000), later=st.integers(0, 10_000))
def test_without_warm_up_no_curve_rises(curve, first, later):
    rate = RateSchedule(1.0, 100, 100.0, curve)
    assert rate.compute_rate(first) >= rate.compute_rate(first + later) - 1e-12


@given(st.integers(0, 499))
def test_warm_up_rises_in_a_line(seen):
    rate = RateSchedule(1.0, 100, 100.0, warmup_epochs=5.0, warmup_factor=0.1)
    assert math.isclose(rate.compute_rate(seen), 0.1 + 0.9 * seen / 500)


def test_the_curve_ends_at_its_minimum_and_stays_there():
    rate = RateSchedule(1.0, 100, 10.0, "cosine", minimum=0.01)
    assert rate.compute_rate(1000) == rate.compute_rate(5000) == pytest.approx(0.01)


def test_the_linear_scaling_rule():
    assert scale_rate(0.1, 128, 256) == 0.2
    assert scale_rate(0.1, None, 256) == 0.1
