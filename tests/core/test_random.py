"""Random numbers depend on what they are for, spread evenly, and are those of the published hash."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.core import random

MASK = 2**64 - 1
WEYL = 0x9E3779B97F4A7C15
words = st.integers(0, MASK)


def splitmix64(state: int) -> int:
    """Return the output of SplitMix64 at `state`, written down from Vigna's splitmix64.c."""
    z = (state + WEYL) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return (z ^ (z >> 31)) & MASK


def test_the_published_first_numbers_of_splitmix64() -> None:
    # Seed 0, the first three outputs: test vectors that many libraries share.
    assert [splitmix64(number * WEYL & MASK) for number in range(3)] == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]
    assert random.make_key(0) == 0xE220A8397B1DCDAF


@given(st.lists(words, max_size=4))
def test_a_key_folds_its_words_by_splitmix64(each: list[int]) -> None:
    state = 0
    for word in each:
        state = splitmix64((state + word) & MASK)
    assert random.make_key(*each) == state


@given(words, st.lists(words, min_size=1, max_size=8))
def test_bits_are_two_rounds_for_each_counter(key: int, counters: list[int]) -> None:
    def hashed(counter: int) -> int:
        once = splitmix64((counter * WEYL + key - WEYL) & MASK)
        return splitmix64((once + key - WEYL) & MASK)

    assert random.bits(key, np.array(counters, np.uint64)).tolist() == [hashed(counter) for counter in counters]


def test_golden_numbers() -> None:
    """Another value here means that every recipe gives other weights: never by accident."""
    assert random.draw_uniform(random.make_key(2, 7), np.array([0, 5, 1_000_000]), 3).tolist() == [
        [0.025471333431098087, 0.41952227448574475, 0.7727901227296036],
        [0.514853353912259, 0.4876977125348493, 0.8631536189156197],
        [0.6888963516704809, 0.6343756716893588, 0.25201376592990476],
    ]


def test_no_two_uses_share_a_stream() -> None:
    uses = [value for name, value in vars(random).items() if name.isupper() and not name.startswith("_")]
    assert len(uses) == len(set(uses)) >= 7
    assert len({random.make_key(use, seed, epoch) for use in uses for seed in range(20) for epoch in range(20)}) == (
        len(uses) * 400
    )


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=20), st.integers(1, 5))
def test_an_index_draws_the_same_whoever_asks(indices: list[int], draws: int) -> None:
    together = random.draw_uniform(7, np.array(indices), draws)
    alone = [random.draw_uniform(7, np.array([index]), draws)[0].tolist() for index in indices]
    assert together.tolist() == alone
    assert together.shape == (len(indices), draws)


@pytest.mark.parametrize("key", [0, 1, random.make_key(random.AUGMENT, 0, 0)])
def test_uniform_numbers_fill_the_interval_evenly(key: int) -> None:
    drawn = random.draw_uniform(key, np.arange(40_000), 4)
    assert drawn.min() >= 0.0
    assert drawn.max() < 1.0
    counts = np.histogram(drawn, bins=64, range=(0, 1))[0]
    expected = drawn.size / 64
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert 20 < chi_square < 130  # 63 degrees of freedom: mean 63, deviation 11
    correlation = np.corrcoef(drawn.T) - np.eye(4)
    assert np.abs(correlation).max() < 5 / 200  # five deviations of 1/sqrt(40,000)


def test_neighboring_keys_and_counters_differ_in_half_their_bits() -> None:
    counters = np.arange(2000, dtype=np.uint64)
    for one, other in (
        (random.bits(5, counters), random.bits(6, counters)),
        (random.bits(5, counters), random.bits(5, counters + np.uint64(1))),
    ):
        flipped = np.unpackbits((one ^ other).view(np.uint8)).mean()
        assert abs(flipped - 0.5) < 5 * 0.5 / np.sqrt(2000 * 64)


def test_seeds_fit_every_generator_of_torch() -> None:
    assert random.make_torch_seed(MASK) == 2**63 - 1
    assert random.make_torch_seed(2) != random.make_torch_seed(4)
