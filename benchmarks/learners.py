"""Whole training steps under each strategy that cuts a model, ours and torch's own used by hand.

| ours | torch's |
|---|---|
| ddp | DistributedDataParallel |
| zero1 | DistributedDataParallel with ZeroRedundancyOptimizer |
| zero2 | fully_shard (FSDP2) with reshard_after_forward=False |
| zero3 | fully_shard |
| hsdp | fully_shard on a mesh of 2 replicas |
| pipeline-*schedule* | that schedule of torch.distributed.pipelining |

Both cut at the same blocks and have the same multi-tensor optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, Final, cast

import timm
import torch
import torchvision
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from benchmarks import processes
from benchmarks.pipelines import SAMPLE, SCHEDULES, pipelined
from benchmarks.processes import Turn
from lockstep.comm.world import World
from lockstep.core.engine_recipe import PlainRecipe
from lockstep.core.mesh import DataRank
from lockstep.core.order import Step
from lockstep.device.memory import keep_freed_memory
from lockstep.device.precision import select_deterministic_kernels
from lockstep.parallel.blocks import find_blocks
from lockstep.parallel.engine import Engine
from lockstep.parallel.numerics import Numerics
from lockstep.parallel.optimize import make_optimizer
from lockstep.tasks.base import MicroBatch, Problem
from lockstep.tasks.classification import Classification

LR: Final = 0.01

Do = Callable[[], object]
Side = Callable[[str, "Work", World], Do]  # ours or torchs
MakeTorch = Callable[[World, "Work", nn.Module], tuple[nn.Module, torch.optim.Optimizer]]


@dataclass(frozen=True)
class Work:
    """What is trained: `samples` are those of a micro-batch, of 32x32 images."""

    model: str
    optimizer: str
    samples: int
    microbatches: int
    sync_batchnorm: bool = False  # ours alone

    @property
    def options(self) -> dict[str, float]:
        """The optimizer's, but for its learning rate."""
        return {"momentum": 0.9} if self.optimizer == "SGD" else {"weight_decay": 0.05}

    def build(self) -> nn.Module:
        """Build the model, each time with the same weights."""
        torch.manual_seed(0)
        return MODELS[self.model]()

    def batch(self, index: int, dummy: bool = False) -> MicroBatch:
        """Make a micro-batch."""
        generator = torch.Generator().manual_seed(index)
        inputs = torch.randn(self.samples, 3, 32, 32, generator=generator)
        targets = torch.randint(10, (self.samples,), generator=generator)
        return MicroBatch(index, (inputs, targets), self.samples, self.samples, dummy)

    def batches(self, data_rank: DataRank) -> list[MicroBatch]:
        """Make the micro-batches of a rank."""
        return [self.batch(index, dummy) for index, dummy in data_rank.get_microbatches(self.microbatches)]


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 16), nn.ReLU(), nn.Linear(16, 10))


def _vit(name: str) -> nn.Module:
    return cast(nn.Module, timm.create_model(name, img_size=32, patch_size=4, num_classes=10))


MODELS: Final[dict[str, Callable[[], nn.Module]]] = {
    "MLP": _mlp,
    "ResNet-18": partial(torchvision.models.resnet18, num_classes=10),
    "ViT-Tiny": partial(_vit, "vit_tiny_patch16_224"),
    "ViT-Small": partial(_vit, "vit_small_patch16_224"),
}


def start(name: str, work: Work, world: World) -> tuple[Engine, list[MicroBatch], Step]:
    """Start our strategy `name`, such as `zero1` or `deepspeed-3`.

    Return its engine, this rank's micro-batches and the step they make.
    """
    select_deterministic_kernels(num_threads=1)
    kind, _, schedule = name.partition("-")
    strategy: Any = import_module(f"lockstep.strategies.{kind}").Strategy(**_options(kind, schedule))
    engine = strategy.start(
        Problem(Classification(), work.build, example=(torch.empty(2, *SAMPLE, device="meta"),)),
        lambda trained, _: make_optimizer(trained, name=work.optimizer, lr=LR, options=work.options),
        world,
        Numerics(PlainRecipe(work.microbatches, batchnorm="sync" if work.sync_batchnorm else "local")),
    )
    own = work.batches(strategy.mesh(world.size).get_data_rank(world.rank))
    return engine, own, Step(0, 0, 0, work.microbatches * work.samples, 0, False)


def ours(name: str, work: Work, world: World) -> Do:
    """Return what does a step under our strategy `name`."""
    engine, own, step = start(name, work, world)

    def do() -> None:
        engine.forward_backward(own, step)
        engine.update(LR, None)

    return do


def torchs(name: str, work: Work, world: World) -> Do:
    """Return what does a step with torch's counterpart of our strategy `name`."""
    kind, _, schedule = name.partition("-")
    if kind == "pipeline":
        return _pipelined(schedule, work, world)
    model, optimizer = _TORCHS[name](world, work, work.build())
    own = work.batches(DataRank(member=world.rank, num_members=world.size))

    def do() -> None:
        for microbatch in own:
            # As FSDP2 by default, so that gradients are cut as soon as there are any; DDP adds its own ones first.
            whole = isinstance(model, DistributedDataParallel) and microbatch is not own[-1]
            with cast(Any, model).no_sync() if whole else nullcontext():
                (F.cross_entropy(model(microbatch.batch[0]), microbatch.batch[1]) / len(own)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return do


def timed(side: Side, name: str, work: Work, world: World) -> Turn:
    """Return what times a step of a contestant, which all ranks begin together."""
    keep_freed_memory()
    return processes.timed(side(name, work, world), world)


def _options(kind: str, schedule: str) -> dict[str, Any]:
    if not schedule:
        return {}
    if kind == "deepspeed":
        return {"stage": int(schedule)}
    return {"schedule": schedule, "stages_per_rank": SCHEDULES[schedule][2]}


def _pipelined(schedule: str, work: Work, world: World) -> Do:
    part, run = pipelined(schedule, work.build(), work.microbatches, world.rank, world.size)
    optimizer = _optimizer(work, part)
    batches = work.batches(DataRank())
    inputs, targets = torch.cat([each.batch[0] for each in batches]), torch.cat([each.batch[1] for each in batches])

    def do() -> None:
        run(inputs, targets)
        optimizer.step()
        optimizer.zero_grad()

    return do


def _ddp(_: World, work: Work, model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    return DistributedDataParallel(model), _optimizer(work, model)


def _zero_redundancy(_: World, work: Work, model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    kind = getattr(torch.optim, work.optimizer)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), kind, lr=LR, foreach=True, **work.options)
    return DistributedDataParallel(model), optimizer


def _fully_shard(
    world: World, work: Work, model: nn.Module, replicas: int, keep_gathered: bool
) -> tuple[nn.Module, torch.optim.Optimizer]:
    shape = (replicas, world.size // replicas) if replicas > 1 else (world.size,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replica", "member")[-len(shape) :])
    for unit in (*find_blocks(model), model):
        fully_shard(unit, mesh=mesh, reshard_after_forward=not keep_gathered)
    if keep_gathered:
        cast(FSDPModule, model).set_reshard_after_backward(work.microbatches == world.size)
    return model, _optimizer(work, model)


def _optimizer(work: Work, model: nn.Module) -> torch.optim.Optimizer:
    kind = getattr(torch.optim, work.optimizer)
    return cast(torch.optim.Optimizer, kind(model.parameters(), lr=LR, foreach=True, **work.options))


_TORCHS: Final[dict[str, MakeTorch]] = {
    "ddp": _ddp,
    "zero1": _zero_redundancy,
    "zero2": partial(_fully_shard, replicas=1, keep_gathered=True),
    "zero3": partial(_fully_shard, replicas=1, keep_gathered=False),
    "hsdp": partial(_fully_shard, replicas=2, keep_gathered=False),
}
