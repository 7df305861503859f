"""Chunks of sequences have the loss and the gradients of the whole, and one set of bits whoever computes them."""

from dataclasses import replace
from typing import Any

import pytest
import sequences
import worlds
from same_bits import Placed, alone, assert_same_bits, placed_as
from sequences import Case

from lockstep.comm.world import World
from lockstep.core.order import Step
from lockstep.errors import UsageError
from lockstep.parallel.context.sequence_chunks import require_sequence_task
from lockstep.parallel.engine import State
from lockstep.tasks.base import MicroBatch
from lockstep.tasks.classification import Classification
from lockstep.tasks.language import Language

SPREAD = (("sequence_parallel", True),)
CASES = {
    "gpt": Case(),
    "rotary, averaged, bf16": Case("rotary", precision="bf16", ema=True),
    "llama": Case("llama", microbatches=4, samples=(8, 5)),
    "sharded": Case("llama", chunks=2, ema=True),  # a rank without work in a round computes another's chunk along
    "fp16": Case(precision="fp16", chunks=2, microbatches=4, samples=(8, 4)),  # whose sums go by halves
    "in chunks of both kinds": Case("many heads", features=2, vocabulary=("embedding.tokens", "head")),
    "sequence-parallel": Case("many heads", features=2),
    "qwen, sequence-parallel": Case("qwen3", chunks=2, features=2, precision="bf16", samples=(8, 5), ema=True),
    "llama in chunks of both kinds": Case("llama", chunks=2, features=2, ema=True, precision="bf16"),
}
# With 3 micro-batches a replica of 2 has one more than the other; steps of 2 samples leave one of 3 without work.
PLACED: dict[str, list[Placed]] = {
    "gpt": [
        ("context", 2, ()),
        ("context", 4, ()),
        ("context", 4, (("replicate", 2),)),
        ("ddp", 3, ()),
        ("zero1", 2, ()),
        ("pipeline", 2, ()),
        ("pipeline", 4, (("schedule", "gpipe"), ("replicate", 2), ("recompute", True))),
        ("mesh", 4, (("pipe", 2), ("context", 2))),
    ],
    "rotary, averaged, bf16": [
        ("context", 4, (("replicate", 2),)),
        ("zero1", 2, ()),
        ("mesh", 4, (("pipe", 2), ("context", 2), ("schedule", "interleaved"))),
    ],
    "llama": [
        ("context", 2, ()),
        ("pipeline", 3, (("schedule", "gpipe"),)),
        ("mesh", 4, (("pipe", 2), ("context", 2))),
    ],
    "sharded": [
        ("mesh", 4, (("context", 2), ("shard", 2))),
        ("mesh", 4, (("context", 2), ("replicate", 2))),
    ],
    "fp16": [
        ("context", 4, (("replicate", 2),)),
        ("mesh", 8, (("replicate", 2), ("pipe", 2), ("context", 2), ("schedule", "naive"))),
    ],
    "in chunks of both kinds": [
        ("context", 2, ()),
        ("tensor", 2, ()),
        ("tensor", 4, (("replicate", 2),)),
        ("mesh", 4, (("tensor", 2), ("context", 2))),
        ("mesh", 8, (("pipe", 2), ("tensor", 2), ("context", 2))),
        ("ddp", 3, ()),
    ],
    "sequence-parallel": [
        ("tensor", 2, SPREAD),
        ("tensor", 4, (("replicate", 2), *SPREAD)),
        ("mesh", 4, (("tensor", 2), ("context", 2), *SPREAD)),
    ],
    "qwen, sequence-parallel": [("tensor", 2, ()), ("tensor", 2, SPREAD)],
    "llama in chunks of both kinds": [
        ("zero1", 2, ()),
        ("mesh", 8, (("replicate", 2), ("tensor", 2), ("context", 2))),
        ("mesh", 8, (("shard", 2), ("tensor", 2), ("context", 2))),
    ],
}


# What another case has: a model in chunks is the same to strategies that put no axis through chunks.
ELSEWHERE = [
    ("gpt", ("ddp", 3, ())),
    ("gpt", ("zero1", 2, ())),
    ("llama", ("context", 2, ())),
    ("llama", ("mesh", 4, (("pipe", 2), ("context", 2)))),
    ("in chunks of both kinds", ("tensor", 4, (("replicate", 2),))),
    ("llama in chunks of both kinds", ("mesh", 8, (("replicate", 2), ("tensor", 2), ("context", 2)))),
]
BEYOND = pytest.mark.slow("this case is on other ranks, and these ranks have another case")
AT_ONCE = [("gpt", ("context", 2, ())), ("gpt", ("mesh", 4, (("pipe", 2), ("context", 2))))]


def _marks(name: str, placed: Placed) -> tuple[pytest.MarkDecorator, ...]:
    if (name, placed) in ELSEWHERE:
        return (BEYOND,)
    return () if (name, placed) in AT_ONCE else (pytest.mark.slow("several ranks"),)


@pytest.mark.imports(sequences.TRANSFORMERS)
@pytest.mark.worlds
@pytest.mark.parametrize(
    ("name", "placed"),
    [pytest.param(name, placed, marks=_marks(name, placed)) for name in CASES for placed in PLACED[name]],
)
def test_any_recipe_has_the_bits_of_one_process(name: str, placed: Placed) -> None:
    assert_same_bits(CASES[name], placed, sequences.whole_trace)


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
def test_a_run_goes_on_elsewhere() -> None:
    case = Case()
    before = replace(case, samples=case.samples[:2])
    state: State = worlds.run(4, sequences.states, before, 0, None)[0][0]
    sharded = ("mesh", 8, (("context", 4), ("shard", 2)))
    piped = ("mesh", 8, (("pipe", 2), ("shard", 2), ("context", 2)))
    _goes_on(case, state, [("zero1", 2, ()), ("context", 2, ()), sharded, piped])


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
def test_a_run_in_chunks_of_both_kinds_goes_on_elsewhere() -> None:
    case = CASES["sequence-parallel"]
    all_kinds = (("pipe", 2), ("tensor", 2), ("context", 2))
    before = replace(case, samples=case.samples[:2], strategy="mesh", options=all_kinds)
    state: State = worlds.run(8, sequences.states, before, 0, None)[0][0]
    _goes_on(case, state, [("tensor", 2, SPREAD), ("pipeline", 2, ()), ("ddp", 3, ())])


def _goes_on(case: Case, state: State, placed: list[Placed]) -> None:
    expected = alone(case, sequences.whole_trace)
    for each in placed:
        for _, trace in worlds.run(each[1], sequences.states, placed_as(case, each), 2, state):
            assert [key for key in trace if trace[key] != expected[key]] == [], each


def _gradients(world: World, model: str, chunks: int, features: int) -> dict[str, Any]:
    """Return the loss and the gradients of a step in float64, without dropout."""
    training: Any = sequences.engine(world, Case(model, chunks, features, microbatches=2))
    inner = training if features == 1 else training._engine
    for module in inner._model.double().modules():
        module.training = False
    batch = sequences.ids(4)
    parts = [MicroBatch(index, batch[2 * index : 2 * index + 2], 2, 0) for index in range(2)]
    sums = training.forward_backward(parts, Step(0, 0, 0, 4, 0, False, 4 * sequences.LENGTH))
    return {"loss": sums.loss, **training.gradients()}


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
@pytest.mark.parametrize(
    ("model", "chunks", "features"), [*((name, 4, 1) for name in sequences.MODELS), ("rotary", 2, 2), ("llama", 2, 2)]
)
def test_chunks_compute_what_the_whole_computes(model: str, chunks: int, features: int) -> None:
    [whole], [chunks] = (worlds.run(1, _gradients, model, *cut) for cut in ((1, 1), (chunks, features)))
    assert whole.keys() == chunks.keys()
    assert max((whole[name] - chunks[name]).abs().max().item() for name in whole) < 1e-10
    assert max(each.abs().max().item() for each in whole.values()) > 1e-3


def test_a_task_that_cuts_no_sequences_is_refused() -> None:
    assert require_sequence_task(Language())
    with pytest.raises(UsageError, match="task Classification does not support splitting sequences into chunks"):
        require_sequence_task(Classification())
