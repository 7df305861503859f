"""An order visits each sample once, and nothing in it tells it from one drawn by chance."""

import hashlib
import itertools
import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lockstep.core import random
from lockstep.core.shuffle import MAX_SORTED_SAMPLES, FeistelNetwork, make_shuffled_order, sort_by_hash

Int64 = NDArray[np.int64]
lengths = st.one_of(st.integers(1, 300), st.integers(MAX_SORTED_SAMPLES - 2, 3 * MAX_SORTED_SAMPLES))


def network(length: int, epoch: int = 0, rounds: int = 8) -> FeistelNetwork:
    keys = [random.make_key(0, epoch, number) for number in range(rounds)]
    return FeistelNetwork(length, tuple(zip(keys[::2], keys[1::2], strict=True)))


@given(st.integers(0, 2**32), st.integers(0, 1000), lengths)
@example(0, 0, 71**2)
@example(0, 0, 71**2 + 1)
def test_each_sample_is_visited_once(seed, epoch, length) -> None:
    order = make_shuffled_order(seed, epoch, length)(np.arange(length))
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(length))


@pytest.mark.parametrize("length", range(1, 130))
def test_a_network_permutes_any_number_of_samples(length: int) -> None:
    assert sorted(network(length)(np.arange(length)).tolist()) == list(range(length))


@given(st.integers(1, 10**12), st.data())
@settings(max_examples=50)
def test_a_network_of_any_length_gives_each_number_to_one_position(length: int, data: st.DataObject) -> None:
    places = np.array(data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=50, unique=True)))
    order = network(length)
    found = order(places)
    assert len({*found.tolist()}) == len(places)
    assert found.min() >= 0
    assert found.max() < length
    assert order(places[:1]).tolist() == found[:1].tolist()  # whatever is asked for with it
    assert (order(places.reshape(1, -1)) == found).all()


def test_golden_orders() -> None:
    """Another value here means that every recipe gives other weights: never by accident."""
    assert sort_by_hash(0, 0, 12).tolist() == [8, 1, 10, 9, 0, 2, 3, 4, 7, 5, 11, 6]
    assert sort_by_hash(0, 1, 12).tolist() == [2, 8, 9, 10, 7, 3, 6, 1, 5, 11, 4, 0]
    assert sort_by_hash(1, 0, 12).tolist() == [7, 9, 4, 5, 6, 0, 11, 8, 10, 3, 1, 2]
    assert _sha256(sort_by_hash(42, 3, 100_000)) == "510536e9a77704da7804d49f154a10e75d0e7ab7419c8ec3909c5767f2de0cf5"
    assert make_shuffled_order(0, 0, 10**10)(np.arange(3)).tolist() == [6581555266, 5869193404, 4374798442]
    digest = _sha256(make_shuffled_order(42, 3, 100_000)(np.arange(100_000)))
    assert digest == "e4e17a46404cf476caa24599b10752fda1ac01cb458f4f5df69d2705262ee339"


def test_the_network_is_that_of_its_description() -> None:
    """Round by round with Python's own numbers, which know no 64 bits."""
    length, columns, rows = 5000, 72, 70
    keys = [random.make_key(random.ORDER, 7, 2, number) for number in range(8)]
    expected = []
    for position in range(length):
        number, is_first = position, True
        while is_first or number >= length:
            row, column = divmod(number, columns)
            for across, down in zip(keys[::2], keys[1::2], strict=True):
                column = (column + _below(across, row, columns)) % columns
                row = (row + _below(down, column, rows)) % rows
            number, is_first = row * columns + column, False
        expected.append(number)
    assert make_shuffled_order(7, 2, length)(np.arange(length)).tolist() == expected


def _sha256(order: Int64) -> str:
    return hashlib.sha256(order.astype("<i8").tobytes()).hexdigest()


def _below(key: int, counter: int, bound: int) -> int:
    word = (counter * 0x9E3779B97F4A7C15 + key) % 2**64
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
    return ((word ^ word >> 31) >> 32) * bound >> 32


def test_few_samples_are_sorted_by_their_hashes() -> None:
    for length in (1, 1437, MAX_SORTED_SAMPLES):
        assert (make_shuffled_order(1, 2, length)(np.arange(length)) == sort_by_hash(1, 2, length)).all()
    assert (
        make_shuffled_order(1, 2, MAX_SORTED_SAMPLES + 1)(np.arange(MAX_SORTED_SAMPLES))
        != sort_by_hash(1, 2, MAX_SORTED_SAMPLES + 1)[:MAX_SORTED_SAMPLES]
    ).any()


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_every_order_of_a_few_is_as_likely_as_any_other(length: int) -> None:
    drawn = 400 * math.factorial(length)
    places = np.arange(length)
    found = [tuple(make_shuffled_order(0, epoch, length)(places).tolist()) for epoch in range(drawn)]
    counts = [found.count(each) for each in itertools.permutations(range(length))]
    assert sum(counts) == drawn
    assert _deviations(np.array(counts), 400) < 4


def test_each_epoch_and_each_seed_has_its_own_order() -> None:
    for length, places in ((50, np.arange(50)), (10**4, np.arange(5))):
        orders = {
            tuple(make_shuffled_order(seed, epoch, length)(places).tolist()) for seed in range(5) for epoch in range(5)
        }
        assert len(orders) == 25


# Each gives a number that is normal, with mean 0 and deviation 1, where orders (a row each) are drawn by chance.
EVEN, NEIGHBORS, STRIDES, SHIFTS, EPOCHS, FIXED, ASCENTS, CYCLES, SIGNS = range(9)


def _figures(orders: Int64) -> list[float]:
    count, length = orders.shape
    columns = 2 * (math.isqrt(length - 1) // 2 + 1)
    cycles = np.array([_cycles(order.tolist()) for order in orders])
    harmonic = sum(1 / number for number in range(1, length + 1))
    spread = harmonic - sum(1 / number**2 for number in range(1, length + 1))
    fixed = (orders == np.arange(length)).sum(1)
    ascents = (np.diff(orders) > 0).sum(1)
    return [
        max(
            _deviations(np.bincount(orders[:, place] * 16 // length, minlength=16), count / 16)
            for place in (0, 1, 2500, -1)
        ),
        _deviations(np.bincount((np.diff(orders) % length).ravel(), minlength=length)[1:]),
        _deviations(np.bincount(((orders[:, columns:] - orders[:, :-columns]) % length).ravel(), minlength=length)[1:]),
        _deviations(np.bincount(((orders - np.arange(length)) % length).ravel(), minlength=length)),
        _deviations(np.bincount((np.diff(orders, axis=0) % length).ravel(), minlength=length)),
        (fixed.mean() - 1) * math.sqrt(count),
        (ascents.mean() - (length - 1) / 2) * math.sqrt(12 * count / (length + 1)),
        (cycles.mean() - harmonic) * math.sqrt(count / spread),
        (((length - cycles) % 2).mean() - 0.5) * 2 * math.sqrt(count),
    ]


def _deviations(counts: Int64, expected: float | None = None) -> float:
    """Return how far a chi-square sum lies above its mean, in its own standard deviations."""
    expected = counts.mean() if expected is None else expected
    freedom = max(1, len(counts) - 1)
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


def _cycles(order: list[int]) -> int:
    seen, count = bytearray(len(order)), 0
    for start in range(len(order)):
        count += not seen[start]
        while not seen[start]:
            seen[start], start = 1, order[start]
    return count


@pytest.mark.parametrize("length", [16 * 257, 65 * 65, 71 * 72])
def test_no_figure_tells_an_order_from_one_drawn_by_chance(length: int) -> None:
    orders = np.stack([make_shuffled_order(1, epoch, length)(np.arange(length)) for epoch in range(250)])
    assert np.abs(_figures(orders)).max() < 4.5


def test_the_figures_tell_a_poor_shuffle() -> None:
    length = 16 * 257
    places = np.arange(length)
    four = _figures(np.stack([network(length, epoch, rounds=4)(places) for epoch in range(250)]))
    assert four[NEIGHBORS] > 100
    two = _figures(np.stack([network(length, epoch, rounds=2)(places) for epoch in range(250)]))
    assert min(two[NEIGHBORS], two[SHIFTS]) > 10
    turned = _figures(np.stack([(places + 7 * epoch) % length for epoch in range(250)]))
    assert min(turned[EVEN], turned[STRIDES], turned[EPOCHS], turned[FIXED], turned[ASCENTS], turned[CYCLES]) > 10
    assert abs(_figures(np.stack([places] * 250))[SIGNS]) > 10
