"""Batches as dicts, uneven tokens, two inputs, tied weights with dropout, transformers: the bits of one process."""

from typing import Any, Final

import pytest
import tokens
from pairs import BEYOND, pairs
from same_bits import Placed, assert_resumed_bits, assert_same_bits
from sequences import TRANSFORMERS
from tokens import Case

pytestmark = [pytest.mark.slow("several ranks"), pytest.mark.worlds]
CASES = {
    "gpt, tied, dropout": Case(ema=True),
    "gpt, rotary, untied": Case("rotary", optimizer="sgd"),
    "gpt, bf16": Case(precision="bf16"),
    "gpt, bf16-compute": Case(precision="bf16-compute", ema=True),
    "two inputs": Case("two", named=True),
    "llama, tied, padded": Case("llama", named=True),
    "llama, no mask": Case("llama"),
    "qwen3": Case("qwen3", named=True, clip=None),
    "gpt2": Case("gpt2", named=True),
}
OURS: Final = [name for name in CASES if not name.startswith(("llama", "qwen", "gpt2"))]
THEIRS: Final = [name for name in CASES if name not in OURS]  # of transformers, which take the most time
# What cuts no model, what cuts tensors, and what cuts modules: each case meets one of each.
PLACED: list[list[Placed]] = [
    [("ddp", 2, ()), ("ddp", 3, ()), ("ddp", 4, ())],
    [("zero1", 3, ()), ("zero2", 2, ()), ("zero3", 3, ()), ("hsdp", 4, (("replicate", 2),))],
    [("pipeline", 2, ()), ("pipeline", 3, ()), ("pipeline", 4, (("replicate", 2),))],
]
OTHERS: Final[list[Placed]] = [("pipeline", 3, ()), ("ddp", 3, ()), ("zero3", 3, ())]
SCHEDULES: list[Placed] = [
    ("pipeline", 2, (("schedule", "gpipe"),)),
    ("pipeline", 2, (("schedule", "interleaved"),)),
    ("pipeline", 3, (("schedule", "zero_bubble"),)),
    ("pipeline", 2, (("recompute", True),)),
    ("pipeline", 4, (("shard", 2),)),
]


def check(name: str, placed: Placed, **changes: Any) -> None:
    assert_same_bits(CASES[name], placed, tokens.whole_trace, **changes)


@pytest.mark.imports(TRANSFORMERS)
@pytest.mark.parametrize(
    ("name", "placed"),
    [
        *(pair for kind in PLACED for pair in pairs(OURS, kind)),
        *pairs(THEIRS, OTHERS),
        *pairs(["gpt, tied, dropout", "gpt, bf16-compute"], SCHEDULES),
        ("llama, tied, padded", SCHEDULES[3]),
        pytest.param("llama, tied, padded", SCHEDULES[4], marks=BEYOND),
    ],
)
def test_the_bits_are_those_of_one_process(name: str, placed: Placed) -> None:
    check(name, placed)


@pytest.mark.parametrize("name", ["gpt, tied, dropout", "llama, tied, padded"])
def test_recomputation_changes_no_bit(name: str) -> None:
    """Blocks of transformers are called with keywords."""
    check(name, ("single", 1, ()), recompute=1)
    check(name, ("zero3", 2, ()), recompute=1)


@pytest.mark.parametrize("ways", [("pipeline", "zero3"), ("ddp", "pipeline")])
def test_going_on_under_another_strategy_gives_the_same_bits(ways: tuple[str, str]) -> None:
    assert_resumed_bits(Case(ema=True), (ways[0], 2, ()), (ways[1], 3, ()), at=2, module=tokens)
