"""Training steps of our GPT: in chunks or in one piece, under our strategies, and sliced by torch's own by hand.

Both slice attention and the feed-forward net of each block, and have AdamW in its multi-tensor form. What torch does
not know is that a layer's outputs are queries, keys and values: it cuts them in the order of rows, so these are put in
the order of ranks first, as who slices by hand does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from lockstep.comm.world import World
from lockstep.core.order import Step
from lockstep.device.precision import fix_kernels
from lockstep.models.gpt import GPT, gpt
from lockstep.parallel.numerics import Numerics
from lockstep.parallel.optimize import make_optimizer
from lockstep.parallel.tensor.built_in import known_plan
from lockstep.parallel.tensor.plan import cut_into_chunks
from lockstep.tasks.base import MicroBatch, Problem
from lockstep.tasks.language import Language

HEADS: Final = 8
VOCAB: Final = {"embedding.tokens": "vocab", "head": "vocab"}
LR: Final = 1e-3
DECAY: Final = 0.05

Do = Callable[[], object]
Side = Callable[["Work", World], Do]


@dataclass(frozen=True)
class Work:
    """A GPT, and the tokens that it learns from in a step; `chunks` are those of the recipe.

    With `by_rows` the table of `vocabulary` rows, and the head that is tied to it, are in chunks too.
    """

    width: int
    layers: int
    sequences: int = 4
    tokens: int = 128
    chunks: int = 1
    microbatches: int = 1
    vocabulary: int = 256
    by_rows: bool = False

    def build(self) -> GPT:
        """Build the model, each time with the same weights."""
        torch.manual_seed(0)
        model = gpt(self.vocabulary, context=self.tokens, layers=self.layers, heads=HEADS, width=self.width)
        assert isinstance(model, GPT)
        if self.chunks > 1:
            cut_into_chunks(model, known_plan(model) | (VOCAB if self.by_rows else {}), self.chunks)
        return model

    def batch(self, index: int) -> tuple[Tensor, Tensor]:
        """Make the tokens of a micro-batch, and those that follow."""
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(self.vocabulary, (self.sequences, self.tokens + 1), generator=generator)
        return ids[:, :-1], ids[:, 1:]

    def loss(self, model: nn.Module) -> Tensor:
        """Return the mean loss of the first micro-batch."""
        ids, targets = self.batch(0)
        return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


def gradients(work: Work, _: World | None = None) -> Do:
    """Return what does a forward and a backward, on one process."""
    fix_kernels(threads=1)
    model = work.build().train()

    def do() -> None:
        work.loss(model).backward()  # type: ignore[no-untyped-call]
        model.zero_grad()

    return do


def ours(name: str, work: Work, world: World) -> Do:
    """Return what does a step under our strategy `name`."""
    fix_kernels(threads=1)
    strategy: Any = import_module(f"lockstep.strategies.{name}").Strategy()
    engine = strategy.start(
        Problem(Language(), work.build),
        lambda trained, _: make_optimizer(trained, name="AdamW", lr=LR, weight_decay=DECAY),
        world,
        Numerics(microbatches=work.microbatches),
    )
    weight = work.sequences * work.tokens
    data_rank = strategy.mesh(world.size).data_rank(world.rank)
    own = [
        MicroBatch(index, work.batch(index), work.sequences, weight, dummy)
        for index, dummy in data_rank.indices(work.microbatches)
    ]
    samples = work.microbatches * work.sequences
    step = Step(0, 0, 0, samples, 0, False, counted=work.microbatches * weight)

    def do() -> None:
        engine.forward_backward(own, step)
        engine.update(LR, None)

    return do


def torchs(work: Work, world: World) -> Do:
    """Return what does a step of a model that torch has sliced for the ranks."""
    model = sliced_by_torch(work.build(), world.size).train()
    # Torch's multi-tensor form takes either tensors that are sliced or tensors that are not.
    groups: list[dict[str, Any]] = [
        {"params": [each for each in model.parameters() if isinstance(each, DTensor) == sliced]}
        for sliced in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, weight_decay=DECAY, foreach=True)

    def do() -> None:
        work.loss(model).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return do


def sliced_by_torch(model: GPT, ranks: int) -> GPT:
    """Slice a model's blocks in place; all `ranks` call it."""
    mesh = init_device_mesh("cpu", (ranks,))
    plan = {
        "attention.queries_keys_values": ColwiseParallel(),
        "attention.out": RowwiseParallel(),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
    }
    for block in model.blocks:
        attention: Any = block.attention
        fused = attention.queries_keys_values.weight
        with torch.no_grad():
            by_rank = fused.view(3, ranks, -1, fused.shape[1]).transpose(0, 1)
            fused.copy_(by_rank.reshape(fused.shape).clone())
        attention.heads //= ranks
        parallelize_module(block, mesh, plan)
    return model
