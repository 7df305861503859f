"""Memory is counted to the byte, peaks are seen, and theory is ZeRO's."""

import pytest

from benchmarks.learners import Work
from benchmarks.strategies_memory import BUFFER_BYTES, Sizes

pytestmark = pytest.mark.slow("other programs, or minutes")

MIB = 2**20


def test_theory_divides_what_a_strategy_divides() -> None:
    sizes = Sizes(parameters=100 * MIB, state=200 * MIB, block=0, activations=7 * MIB)
    between = {name: sizes.expected(name, 4, "between steps") - BUFFER_BYTES for name in ("zero1", "zero2", "zero3")}
    assert between == {"zero1": 150 * MIB, "zero2": 75 * MIB, "zero3": 75 * MIB}
    within = {name: sizes.expected(name, 4, "in a step") - BUFFER_BYTES for name in ("zero2", "zero3")}
    assert within == {"zero2": (75 + 25 + 100 + 7) * MIB, "zero3": (75 + 25 + 25) * MIB}


def test_theory_of_a_stage_counts_copies_and_micro_batches_in_flight() -> None:
    sizes = Sizes(parameters=100 * MIB, state=200 * MIB, block=0, activations=7 * MIB)
    assert sizes.expected_of_stage(8, 3, "between steps") == BUFFER_BYTES + 300 * MIB
    assert sizes.expected_of_stage(8, 3, "in a step") == BUFFER_BYTES + (300 + 4 * 100 + 3 * 7) * MIB
    assert sizes.expected_of_stage(1, 1, "in a step") == BUFFER_BYTES + (300 + 200) * MIB


def test_sizes_are_those_of_the_model() -> None:
    work = Work("ViT-Tiny", "AdamW", 1, microbatches=1)
    sizes = Sizes.of(work.build(), work)
    assert sizes.parameters == 5_362_762 * 4
    assert sizes.state == 2 * sizes.parameters
    assert sizes.parameters / 13 < sizes.block < sizes.parameters / 12
    assert MIB < sizes.activations < 20 * MIB
