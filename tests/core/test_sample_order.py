"""An order is shuffled, sequential, or what a function of the epoch returns."""

from typing import Any

import numpy as np
import pytest
import torch

from lockstep.core.sample_order import SampleOrder
from lockstep.core.shuffle import make_shuffled_order
from lockstep.errors import UsageError

POSITIONS = np.arange(10)


def test_the_default_is_the_shuffle_and_sequential_is_none() -> None:
    assert (
        SampleOrder("shuffled", 3, 10).get_epoch_order(2)(POSITIONS) == make_shuffled_order(3, 2, 10)(POSITIONS)
    ).all()
    assert (SampleOrder("sequential", 3, 10).get_epoch_order(2)(POSITIONS) == POSITIONS).all()
    assert SampleOrder("sequential", 3, 10).samples_per_epoch == 10


@pytest.mark.parametrize("make", [list, np.array, torch.tensor])
def test_a_function_gives_the_samples_of_an_epoch(make: Any) -> None:
    order = SampleOrder(lambda epoch: make([epoch, 9, 9]), 0, 10)
    assert (order.samples_per_epoch, order.get_epoch_order(4)(np.array([0, 2])).tolist()) == (3, [4, 9])
    assert order.compute_digest(0) in order.name
    assert order.compute_digest(0) != order.compute_digest(1)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("random", "run.steps: order is 'random'; pass 'shuffled', 'sequential', or a function of the epoch"),
        (lambda epoch: [0.5], "the order of epoch 1 has dtype float64 and shape .1.; return a list"),
        (lambda epoch: [[1]], r"and shape \[1, 1\]; return a list or 1-dim array of integers, one for each"),
        (lambda epoch: [], "return a list or 1-dim array of integers"),
        (lambda epoch: [3, 10], "has indices from 3 to 10, but there are 10 samples; return indices from 0 to 9"),
        (lambda epoch: [-1], "has indices from -1 to -1"),
        (lambda epoch: [0] * (5 + epoch), "has 6 samples in epoch 1, but 5 in epoch 0; return the same number"),
        (lambda epoch: 1 // 0, "run.steps: order: ZeroDivisionError"),
    ],
)
def test_what_is_no_order_is_refused(asked: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        SampleOrder(asked, 0, 10, "run.steps").get_epoch_order(1)
