"""Batches as dicts, uneven tokens, two inputs, tied weights with dropout, transformers: the bits of one process."""

from dataclasses import replace
from typing import Any, Final

import pytest
import tokens
import worlds
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
PLACED: list[tuple[str, int, tuple[tuple[str, Any], ...]]] = [
    ("ddp", 2, ()),
    ("ddp", 3, ()),
    ("ddp", 4, ()),
    ("zero1", 3, ()),
    ("zero2", 2, ()),
    ("zero3", 3, ()),
    ("hsdp", 4, (("replicate", 2),)),
    ("pipeline", 2, ()),
    ("pipeline", 3, ()),
    ("pipeline", 4, (("replicate", 2),)),
]
# The models of transformers, which take the most time: what cuts no model, what cuts tensors and what cuts modules.
OTHERS: Final = [PLACED[1], PLACED[5], PLACED[8]]
SCHEDULES: list[tuple[str, int, tuple[tuple[str, Any], ...]]] = [
    ("pipeline", 2, (("schedule", "gpipe"),)),
    ("pipeline", 2, (("schedule", "interleaved"),)),
    ("pipeline", 3, (("schedule", "zero_bubble"),)),
    ("pipeline", 2, (("recompute", True),)),
    ("pipeline", 4, (("shard", 2),)),
]


def differing(case: Case, placed: list[tuple[str, int, tuple[tuple[str, Any], ...]]]) -> dict[str, list[str]]:
    [alone] = worlds.run(1, tokens.whole_trace, case, timeout=60.0)
    found = {}
    for strategy, size, options in placed:
        cut = replace(case, strategy=strategy, options=options)
        for rank, trace in enumerate(worlds.run(size, tokens.whole_trace, cut, timeout=110.0)):
            wrong = [key for key in {**alone, **trace} if trace.get(key) != alone.get(key)]
            if wrong:
                found[f"{strategy} {size} {options} rank {rank}"] = wrong
    return found


@pytest.mark.worlds
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CASES)
def test_the_bits_are_those_of_one_process(name: str) -> None:
    assert not differing(CASES[name], OTHERS if name.startswith(("llama", "qwen", "gpt2")) else PLACED)


@pytest.mark.worlds
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["gpt, tied, dropout", "gpt, bf16-compute", "llama, tied, padded"])
def test_schedules_of_pipelines_change_no_bit(name: str) -> None:
    assert not differing(CASES[name], SCHEDULES[-2:] if name.startswith("llama") else SCHEDULES)


@pytest.mark.worlds
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["gpt, tied, dropout", "llama, tied, padded"])
def test_recomputation_changes_no_bit(name: str) -> None:
    """Blocks of transformers are called with keywords."""
    again = replace(CASES[name], recompute=1)
    [plain] = worlds.run(1, tokens.whole_trace, CASES[name], timeout=60.0)
    for size, strategy in ((1, "single"), (2, "zero3")):
        for trace in worlds.run(size, tokens.whole_trace, replace(again, strategy=strategy), timeout=60.0):
            assert trace == plain


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
