"""Training steps of our GPT: in chunks or in one piece, under our strategies, and sliced by torch's own by hand.

Both slice attention and the feed-forward net of each block, and have AdamW in its multi-tensor form. What torch does
not know is that a layer's outputs are queries, keys and values: it cuts them in the order of rows, so these are put in
the order of ranks first, as who slices by hand does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from benchmarks.processes import Turn, timed
from lockstep.comm.world import World
from lockstep.core.engine_recipe import PlainRecipe
from lockstep.core.order import Step
from lockstep.device.live_bytes import LiveByteCounter
from lockstep.device.memory import keep_freed_memory
from lockstep.device.precision import select_deterministic_kernels
from lockstep.models.gpt import GPT, gpt
from lockstep.parallel.numerics import Numerics
from lockstep.parallel.optimize import make_optimizer
from lockstep.parallel.tensor.built_in import get_built_in_plan
from lockstep.parallel.tensor.plan import split_into_chunks
from lockstep.tasks.base import MicroBatch, Problem
from lockstep.tasks.language import Language

HEADS: Final = 8
SLICES: Final = 2  # along tensor, in a mesh
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
            split_into_chunks(model, get_built_in_plan(model) | (VOCAB if self.by_rows else {}), self.chunks)
        return model

    def batch(self, index: int) -> tuple[Tensor, Tensor]:
        """Make the tokens of a micro-batch, and those that follow."""
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(self.vocabulary, (self.sequences, self.tokens + 1), generator=generator)
        return ids[:, :-1], ids[:, 1:]

    def loss(self, model: nn.Module, index: int = 0) -> Tensor:
        """Return the mean loss of a micro-batch."""
        ids, targets = self.batch(index)
        return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


def gradients(work: Work, _: World | None = None) -> Do:
    """Return what does a forward and a backward, on one process."""
    select_deterministic_kernels(num_threads=1)
    model = work.build().train()

    def do() -> None:
        work.loss(model).backward()  # type: ignore[no-untyped-call]
        model.zero_grad()

    return do


def ours(name: str, work: Work, world: World, options: Mapping[str, int] | None = None) -> Do:
    """Return what does a step under our strategy `name`, with its options."""
    select_deterministic_kernels(num_threads=1)
    strategy: Any = import_module(f"lockstep.strategies.{name}").Strategy(**(options or {}))
    engine = strategy.start(
        Problem(Language(), work.build),
        lambda trained, _: make_optimizer(trained, name="AdamW", lr=LR, weight_decay=DECAY),
        world,
        Numerics(PlainRecipe(microbatches=work.microbatches)),
    )
    weight = work.sequences * work.tokens
    data_rank = strategy.mesh(world.size).get_data_rank(world.rank)
    own = [
        MicroBatch(index, work.batch(index), work.sequences, weight, dummy)
        for index, dummy in data_rank.get_microbatches(work.microbatches)
    ]
    samples = work.microbatches * work.sequences
    step = Step(0, 0, 0, samples, 0, False, total_weight=work.microbatches * weight)

    def do() -> object:
        sums = engine.forward_backward(own, step)
        engine.update(LR, None)
        return sums.loss

    return do


def torchs(work: Work, world: World) -> Do:
    """Return what does a step of a model that torch has sliced for the ranks."""
    model = sliced_by_torch(work.build(), init_device_mesh("cpu", (world.size,))).train()
    return _stepping(model, partial(work.loss, model))


def composed(work: Work, world: World) -> Do:
    """Return what does a step where two ranks next to each other share a slice's layers, and the others its rows.

    Each pair has a micro-batch of its own; fully_shard takes the mean of their gradients.
    """
    mesh = init_device_mesh("cpu", (world.size // SLICES, SLICES), mesh_dim_names=("shard", "tensor"))
    model = sliced_by_torch(work.build(), mesh["tensor"]).train()
    for block in model.blocks:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    return _stepping(model, partial(work.loss, model, mesh.get_local_rank("shard")))


def _stepping(model: nn.Module, loss: Callable[[], Tensor]) -> Do:
    # Torch's multi-tensor form takes tensors of one kind: not sliced, or sliced along the same axes.
    kinds: dict[tuple[str, ...] | None, list[nn.Parameter]] = {}
    for each in model.parameters():
        kind = tuple(each.device_mesh.mesh_dim_names or ()) if isinstance(each, DTensor) else None
        kinds.setdefault(kind, []).append(each)
    groups = [{"params": params} for params in kinds.values()]
    optimizer = torch.optim.AdamW(groups, lr=LR, weight_decay=DECAY, foreach=True)

    def do() -> None:
        loss().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return do


def sliced_by_torch(model: GPT, mesh: DeviceMesh) -> GPT:
    """Slice a model's blocks in place; all ranks of a mesh of one axis call it."""
    ranks = mesh.size()
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


def time_of_step(side: Side, work: Work, world: World, clock: Callable[[], float] = time.perf_counter) -> Turn:
    """Return what times a step."""
    keep_freed_memory()
    return timed(side(work, world), world, clock)


def memory_of_step(side: Side, work: Work, world: World) -> Turn:
    """Return what counts the MiB in use at most in a step, from before the model is built on."""
    side(replace(_WARM, chunks=work.chunks, microbatches=work.microbatches), world)()
    live = LiveByteCounter()
    do = side(work, world)
    do()
    return lambda: live.measure_peak(do) / 2**20


_WARM: Final = Work(8 * HEADS, layers=1)  # of a process that has computed nothing yet
