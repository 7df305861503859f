"""Tiny language models that are computed in chunks of their sequences, and steps for them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import toys
from torch import Tensor, nn
from toys import Trace

from lockstep.comm.world import World
from lockstep.core.batch import Inputs
from lockstep.core.order import Step
from lockstep.core.precision import Precision
from lockstep.core.shard import ChunkLayout
from lockstep.models.gpt import gpt
from lockstep.models.hugging_face import build_transformers_model
from lockstep.parallel.context.sequence_chunks import add_position_ids, get_argument_names
from lockstep.parallel.engine import Engine, State
from lockstep.parallel.tensor.built_in import get_built_in_plan
from lockstep.parallel.tensor.canonical_state import CanonicalState
from lockstep.parallel.tensor.plan import split_into_chunks
from lockstep.tasks.base import MicroBatch
from lockstep.tasks.language import Language

WORDS, LENGTH = 19, 16
TRANSFORMERS = "transformers.models.llama.modeling_llama"  # a second of imports
LLAMA = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 24,
    "attention_dropout": 0.1,
    "tie_word_embeddings": True,
}
QWEN = {**LLAMA, "head_dim": 2, "attention_dropout": 0.0, "tie_word_embeddings": False}  # norms of each head
MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": partial(gpt, WORDS, LENGTH, 2, 4, 16, 0.2),
    "many heads": partial(gpt, WORDS, LENGTH, 2, 8, 16, 0.2),
    "rotary": partial(gpt, WORDS, LENGTH, 2, 4, 16, 0.1, "rotary", True, False),
    "llama": partial(build_transformers_model, "llama", options=LLAMA, dataset_info={"vocabulary": WORDS}),
    "qwen3": partial(build_transformers_model, "qwen3", options=QWEN, dataset_info={"vocabulary": WORDS}),
}


@dataclass(frozen=True)
class Case:
    """A recipe and its placement: `samples` are the sizes of the steps, `features` the chunks of heads and features."""

    model: str = "gpt"
    chunks: int = 4
    features: int = 1
    vocabulary: tuple[str, ...] = ()  # what of it is cut by rows, as well
    microbatches: int = 3
    samples: tuple[int, ...] = (6, 7, 2)
    optimizer: str = "adamw"
    clip: float | None = 0.5
    precision: Precision = "fp32"
    static_scale: float | None = None
    ema: bool = False
    strategy: str = "context"
    options: tuple[tuple[str, Any], ...] = ()


def build(case: Case) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = MODELS[case.model]()
    _cut(model, case)
    return model


def _cut(model: nn.Module, case: Case) -> dict[str, ChunkLayout]:
    plan = {**dict.fromkeys(case.vocabulary, "vocab"), **get_built_in_plan(model)}
    return split_into_chunks(model, plan, case.features) if case.features > 1 else {}


def ids(samples: int, seed: int = 3) -> Tensor:
    return torch.randint(WORDS, (samples, LENGTH + 1), generator=torch.Generator().manual_seed(seed))


def engine(world: World, case: Case) -> Engine:
    example: Inputs = (ids(2)[:, :-1].to("meta"),)
    if case.chunks > 1:
        example = add_position_ids(example, get_argument_names(build(case)))
    started: Engine = toys.started(
        world, case, Language(), build, example, static_scale=case.static_scale, sequence_chunks=case.chunks
    )
    return CanonicalState(started, _cut(MODELS[case.model](), case)) if case.features > 1 else started


def steps(case: Case) -> Iterator[tuple[Step, Tensor]]:
    seen = 0
    for number, samples in enumerate(case.samples):
        yield Step(number, 0, seen, samples, seen, False, samples * LENGTH), ids(samples, number)
        seen += samples


def states(world: World, case: Case, first: int, state: State | None) -> tuple[State, Trace]:
    """Train on from `state` at step `first`; return the state as a checkpoint has it, and all there is to compare."""
    training = engine(world, case)
    if state is not None:
        training.load(state)
    given = ((step, share(world, case, step, batch), None) for step, batch in list(steps(case))[first:])
    return toys.ended(world, training, toys.train(training, given, lambda _: 0.02, case.clip))


def share(world: World, case: Case, step: Step, batch: Tensor) -> list[MicroBatch]:
    dealt = toys.dealt(world, case, step)
    return [MicroBatch(index, batch[samples], len(samples), 0, dummy) for index, samples, dummy in dealt]


def whole_trace(world: World, case: Case) -> Trace:
    """Train and return all there is to compare."""
    return states(world, case, 0, None)[1]
