"""Batches as dicts, uneven tokens, two inputs, tied weights with dropout, transformers: the bits of one process."""

from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any, Final

import pytest
import tokens
import worlds
from pairs import BEYOND, pairs
from sequences import TRANSFORMERS
from tokens import Case

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
Placed = tuple[str, int, tuple[tuple[str, Any], ...]]
# What cuts no model, what cuts tensors, and what cuts modules: each case meets one of each, in the gate.
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


@cache
def alone(name: str) -> dict[str, Any]:
    """Return what a case has on one process."""
    [trace] = worlds.run(1, tokens.whole_trace, CASES[name], timeout=60.0)
    return dict(trace)


def differing(name: str, placed: Placed) -> dict[int, list[str]]:
    """Return for each rank that has other bits than one process where."""
    strategy, size, options = placed
    expected, found = alone(name), {}
    cut = replace(CASES[name], strategy=strategy, options=options)
    for rank, trace in enumerate(worlds.run(size, tokens.whole_trace, cut, timeout=110.0)):
        wrong = [key for key in {**expected, **trace} if trace.get(key) != expected.get(key)]
        if wrong:
            found[rank] = wrong
    return found


@pytest.mark.worlds
@pytest.mark.timeout(180)
@pytest.mark.parametrize(("name", "placed"), [pair for kind in PLACED for pair in pairs(OURS, kind)])
def test_the_bits_are_those_of_one_process(name: str, placed: Placed) -> None:
    assert not differing(name, placed)


@pytest.mark.imports(TRANSFORMERS)
@pytest.mark.worlds
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("name", "placed"), [*product(THEIRS[:1], OTHERS), *pairs(THEIRS[1:], [OTHERS[1], OTHERS[2], OTHERS[0]])]
)
def test_models_of_transformers_have_the_bits_of_one_process(name: str, placed: Placed) -> None:
    assert not differing(name, placed)


@pytest.mark.worlds
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("name", "placed"),
    [
        *pairs(["gpt, tied, dropout", "gpt, bf16-compute"], SCHEDULES),
        ("llama, tied, padded", SCHEDULES[3]),
        pytest.param("llama, tied, padded", SCHEDULES[4], marks=BEYOND),
    ],
)
def test_schedules_of_pipelines_change_no_bit(name: str, placed: Placed) -> None:
    assert not differing(name, placed)


@pytest.mark.worlds
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["gpt, tied, dropout", "llama, tied, padded"])
def test_recomputation_changes_no_bit(name: str) -> None:
    """Blocks of transformers are called with keywords."""
    again = replace(CASES[name], recompute=1)
    for size, strategy in ((1, "single"), (2, "zero3")):
        for trace in worlds.run(size, tokens.whole_trace, replace(again, strategy=strategy), timeout=60.0):
            assert trace == alone(name)


@pytest.mark.worlds
@pytest.mark.timeout(300)
@pytest.mark.parametrize("ways", [("pipeline", "zero3"), ("ddp", "pipeline")])
def test_going_on_under_another_strategy_gives_the_same_bits(ways: tuple[str, str]) -> None:
    whole = Case(ema=True)
    [(_, uninterrupted)] = worlds.run(1, tokens.states, whole, 0, None)
    first, second = (replace(whole, strategy=strategy) for strategy in ways)
    state, trace = worlds.run(2, tokens.states, replace(first, samples=whole.samples[:2]), 0, None)[0]
    for _, rest in worlds.run(3, tokens.states, second, 2, state):
        assert {**trace, **rest} == uninterrupted
