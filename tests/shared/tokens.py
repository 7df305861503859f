"""Models of tokens and of several inputs, a task whose batches are dicts and weigh uneven numbers of tokens."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import toys
from torch import Tensor, nn
from torch.nn import functional as F
from toys import Trace

from lockstep.comm.world import World
from lockstep.core import batch as batches
from lockstep.core.order import Step
from lockstep.core.precision import Precision
from lockstep.models.gpt import gpt
from lockstep.models.hugging_face import build_transformers_model
from lockstep.parallel.engine import Engine, State
from lockstep.tasks.base import LOSS, MicroBatch, Monitor
from lockstep.tasks.batches import get_predictions

WORDS, LENGTH = 19, 6
PADDED = -100


class NextToken:
    """Batches are {"ids", "mask"}: where the mask is 0 there is no token, and nothing to learn or to weigh."""

    counts_samples = False
    unit = "tokens"
    fractions: tuple[str, ...] = ()
    monitor: Monitor = LOSS

    def __init__(self, named: bool) -> None:
        self._named = named  # whether the model is given mask and ids by their names

    def inputs(self, batch: Mapping[str, Tensor]) -> Any:
        return {"input_ids": batch["ids"], "attention_mask": batch["mask"]} if self._named else (batch["ids"],)

    def weight(self, batch: Mapping[str, Tensor]) -> int:
        return int(batch["mask"].sum())

    def loss(self, outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
        targets = batch["next"].masked_fill(batch["mask"] == 0, PADDED)
        return F.cross_entropy(get_predictions(outputs).flatten(0, 1).float(), targets.flatten(), reduction="sum")

    def sums(self, outputs: Any, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {}

    def figures(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        return {}


class TwoInputs(nn.Module):
    """Takes ids and a mask by name, gives a dict; both are used in every layer, and no two calls are alike."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, 16)
        self.first = nn.Linear(16, 16)
        self.drop = nn.Dropout(0.2)
        self.second = nn.Linear(16, 16)
        self.third = nn.Linear(16, 16)
        self.out = nn.Linear(16, WORDS)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        kept = attention_mask.unsqueeze(-1)
        x = self.drop(self.first(self.table(input_ids)) * kept).relu()
        x = x + self.second(x * kept).relu()
        x = self.third(x).tanh() * kept
        return {"logits": self.out(x), "features": x}


TINY: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1,
              "intermediate_size": 24, "attention_dropout": 0.1, "tie_word_embeddings": True},
    "qwen3": {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1,
              "head_dim": 8, "intermediate_size": 24},
    "gpt2": {"n_embd": 16, "n_layer": 3, "n_head": 2},
}  # fmt: skip

MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": partial(gpt, WORDS, LENGTH, 3, 2, 16, 0.2),
    "rotary": partial(gpt, WORDS, LENGTH, 3, 2, 16, 0.1, "rotary", True, False),
    "two": TwoInputs,
    **{
        name: partial(build_transformers_model, name, options=options, dataset_info={"vocabulary": WORDS})
        for name, options in TINY.items()
    },
}


@dataclass(frozen=True)
class Case:
    """A recipe and its placement: `samples` are the sizes of the steps."""

    model: str = "gpt"
    named: bool = False
    microbatches: int = 4
    samples: tuple[int, ...] = (8, 7, 3)
    optimizer: str = "adamw"
    precision: Precision = "fp32"
    clip: float | None = 0.5
    ema: bool = False
    recompute: int = 0
    strategy: str = "ddp"
    options: tuple[tuple[str, Any], ...] = ()


def build(case: Case) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return MODELS[case.model]()


def engine(world: World, case: Case) -> Engine:
    task = NextToken(case.named)
    [(_, batch), *_] = steps(replace(case, samples=(2,)))
    example = batches.map_tensors(lambda tensor: tensor.to("meta"), task.inputs(batch))
    return toys.started(world, case, task, build, example, recompute=case.recompute)


def steps(case: Case) -> Iterator[tuple[Step, dict[str, Tensor]]]:
    """Yield each step with all its samples, the lengths of which differ."""
    generator = torch.Generator().manual_seed(3)
    seen = 0
    for number, samples in enumerate(case.samples):
        ids = torch.randint(WORDS, (samples, LENGTH + 1), generator=generator)
        lengths = torch.randint(1, LENGTH + 1, (samples, 1), generator=generator)
        mask = (torch.arange(LENGTH) < lengths).long()
        step = Step(number, 0, seen, samples, seen, False, int(mask.sum()))
        yield step, {"ids": ids[:, :-1].contiguous(), "next": ids[:, 1:].contiguous(), "mask": mask}
        seen += samples


def share(world: World, case: Case, step: Step, batch: dict[str, Tensor]) -> list[MicroBatch]:
    """Return this rank's micro-batches."""
    found = []
    for index, samples, dummy in toys.dealt(world, case, step):
        own = {name: tensor[samples] for name, tensor in batch.items()}
        found.append(MicroBatch(index, own, len(samples), int(own["mask"].sum()), dummy))
    return found


def whole_trace(world: World, case: Case) -> Trace:
    """Train and return all there is to compare."""
    return states(world, case, 0, None)[1]


def states(world: World, case: Case, first: int, state: State | None) -> tuple[State, Trace]:
    """Train on from `state` at step `first`; return the state as a checkpoint has it, and all there is to compare."""
    training = engine(world, case)
    if state is not None:
        training.load(state)
    task = NextToken(case.named)
    given = (
        (step, share(world, case, step, batch), task.inputs({name: tensor[:2] for name, tensor in batch.items()}))
        for step, batch in list(steps(case))[first:]
    )
    return toys.ended(world, training, toys.train(training, given, lambda _: 0.02, case.clip))
