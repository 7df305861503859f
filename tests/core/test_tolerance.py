"""The tolerance of what is only close: above what other orders of the same sums give, and not far above."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.core.tolerance import (
    compute_comm_tolerance,
    compute_probabilistic_bound,
    compute_tolerance,
    compute_unit_roundoff,
    compute_worst_case_bound,
)

FP32 = compute_unit_roundoff("fp32")

lengths = st.integers(1, 10**6)
roundoffs = st.sampled_from([compute_unit_roundoff("fp32"), compute_unit_roundoff("fp64")])


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("fp64", torch.float64), ("fp32", torch.float32), ("fp16", torch.float16), ("bf16", torch.bfloat16)],
)
def test_unit_roundoff_is_half_the_distance_of_one_to_the_next_number(name, dtype):
    assert compute_unit_roundoff(name) == torch.finfo(dtype).eps / 2


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=2, max_size=200), st.randoms(use_true_random=False))
def test_no_order_of_a_sum_is_off_by_more_than_the_worst_case(terms, random):
    random.shuffle(terms)
    total = np.float32(0)
    for term in terms:
        total += np.float32(term)
    magnitude = math.fsum(map(abs, terms))
    assert abs(float(total) - math.fsum(terms)) <= compute_worst_case_bound(FP32, len(terms)) * magnitude


@given(st.integers(100, 5000), st.integers(0, 2**32 - 1))
def test_two_orders_of_a_random_sum_differ_by_less_than_the_tolerance(length, seed):
    terms = np.random.default_rng(seed).standard_normal(length).astype(np.float32)
    forward, backward = np.cumsum(terms, dtype=np.float32)[-1], np.cumsum(terms[::-1], dtype=np.float32)[-1]
    assert abs(float(forward) - float(backward)) <= compute_tolerance(FP32, length, 1, 1) * float(np.abs(terms).sum())


@given(roundoffs, lengths)
def test_the_likely_bound_grows_with_the_root(roundoff, length):
    assert compute_probabilistic_bound(roundoff, 4 * length) == pytest.approx(
        2 * compute_probabilistic_bound(roundoff, length), rel=0.1
    )
    assert compute_worst_case_bound(roundoff, 2 * length) >= 2 * compute_worst_case_bound(roundoff, length)


@given(roundoffs, lengths, st.integers(1, 200), st.integers(1, 20))
def test_more_of_anything_allows_more_and_never_more_than_the_worst_case(roundoff, length, depth, steps):
    here = compute_tolerance(roundoff, length, depth, steps)
    assert 0 < here <= 2 * depth * steps * compute_worst_case_bound(roundoff, length)
    assert here < compute_tolerance(roundoff, length + 1, depth, steps)
    assert here < compute_tolerance(roundoff, length, depth + 1, steps)
    assert here < compute_tolerance(roundoff, length, depth, steps + 1)


def test_short_sums_take_the_worst_case_and_long_ones_the_likely():
    assert compute_tolerance(FP32, 10, 1, 1) == 2 * compute_worst_case_bound(FP32, 10)
    assert (
        compute_tolerance(FP32, 4096, 1, 1)
        == 2 * compute_probabilistic_bound(FP32, 4096)
        == pytest.approx(6.1e-5, rel=0.01)
    )


def test_nothing_is_promised_where_all_digits_may_be_lost():
    assert compute_worst_case_bound(compute_unit_roundoff("bf16"), 256) == math.inf
    assert compute_tolerance(compute_unit_roundoff("bf16"), 10**6, 1, 1) == math.inf


def test_what_is_sent_in_16_bits_is_off_by_a_rounding_for_each_rank_and_step():
    assert compute_comm_tolerance(compute_unit_roundoff("fp16"), 1, 1) == pytest.approx(2 * 2**-11, rel=1e-3)
    assert compute_comm_tolerance(compute_unit_roundoff("bf16"), 4, 3) == 6 * compute_worst_case_bound(
        compute_unit_roundoff("bf16"), 4
    )
