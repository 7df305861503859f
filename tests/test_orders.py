"""Weighted sampling and batches by length: functions of seed and epoch, with the right samples."""

import numpy as np
import pytest

from lockstep.errors import UsageError
from lockstep.orders import ByLength, Weighted

WEIGHTS = [0.0, 1.0, 2.0, 5.0, 0.0]


def test_samples_are_drawn_as_often_as_their_weights_say() -> None:
    drawn = np.bincount(Weighted(WEIGHTS, samples=8000)(0), minlength=5)
    assert drawn.sum() == 8000
    np.testing.assert_allclose(drawn, [0, 1000, 2000, 5000, 0], atol=200)


def test_without_replacement_no_sample_comes_twice_and_heavy_ones_come_first() -> None:
    firsts = []
    for epoch in range(4000):
        drawn = Weighted(WEIGHTS, samples=3, replacement=False)(epoch).tolist()
        assert sorted(drawn) == [1, 2, 3]
        firsts.append(drawn[0])
    np.testing.assert_allclose(np.bincount(firsts, minlength=5), [0, 500, 1000, 2500, 0], atol=150)


def test_an_order_follows_from_seed_and_epoch_alone() -> None:
    for make in (
        lambda seed: Weighted(WEIGHTS, seed, samples=50),
        lambda seed: ByLength(range(100), batch=4, seed=seed, pool=2),
    ):
        assert (make(1)(3) == make(1)(3)).all()
        assert (make(1)(3) != make(1)(4)).any()
        assert (make(1)(3) != make(2)(3)).any()


def test_batches_by_length_hold_each_sample_once_and_alike_ones_together() -> None:
    lengths = np.random.default_rng(0).integers(1, 500, 203)
    order = ByLength(lengths, batch=10, pool=10)(0)
    assert sorted(order.tolist()) == list(range(203))
    batches = [lengths[order[first : first + 10]] for first in range(0, 200, 10)]
    assert max(np.ptp(each) for each in batches) < 150  # of 500
    assert [each.max() for each in batches] != sorted(each.max() for each in batches)  # batches are shuffled


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Weighted([1.0, -1.0]), "weights must be a 1-D sequence of finite, non-negative numbers"),
        (lambda: Weighted([0.0, 0.0]), "that are not all 0"),
        (lambda: Weighted([float("nan")]), "of finite, non-negative numbers"),
        (
            lambda: Weighted(WEIGHTS, replacement=False),
            "cannot draw 5 samples without replacement, because only 3 of 5 samples",
        ),
        (lambda: Weighted(WEIGHTS, samples=0), "samples must be at least 1, got 0"),
        (lambda: ByLength([], batch=4), "one length for each sample"),
        (lambda: ByLength([1], batch=0), "batch and pool must be at least 1"),
    ],
)
def test_what_cannot_be_drawn_from_is_refused(make: object, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        make()  # type: ignore[operator]
