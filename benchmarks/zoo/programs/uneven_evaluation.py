"""An evaluation of sharded weights ends if ranks have different numbers of batches."""

import os
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from benchmarks.zoo.loops import Task, engine_of, filled, ranked
from benchmarks.zoo.program import Numbers, Program


def wide() -> nn.Module:
    """Return a model that ZeRO-3 does not keep whole: DeepSpeed shards tensors from 100,000 numbers on."""
    return filled(nn.Sequential(nn.Linear(4, 40000), nn.Tanh(), nn.Linear(40000, 2)))


TASK = Task(wide, samples=5, batch=2, micro=1, stage=3)


def mine() -> list[tuple[Tensor, Tensor]]:
    """Return three batches on rank 0, two on rank 1."""
    inputs, targets = TASK.dataset().tensors
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return [(inputs[i : i + 1], targets[i : i + 1]) for i in range(rank, 5, size)]


def evaluate(model: Any) -> Numbers:
    """Add the losses of this rank, and then those of all."""
    total = torch.zeros(())
    with torch.no_grad():
        for x, y in mine():
            total = total + TASK.loss(model(x), y).float()
    if dist.is_initialized():
        dist.all_reduce(total)
    return {"loss": total}


def reference() -> Numbers:
    """Add the losses of all batches on one process."""
    model, (inputs, targets) = TASK.build(), TASK.dataset().tensors
    return {"loss": sum(TASK.loss(model(x), y).detach() for x, y in zip(inputs, targets, strict=True))}  # type: ignore[dict-item]


def wrapped(wrap: Any) -> Numbers:
    """Evaluate a model as torch distributes it."""
    ranked()
    return evaluate(wrap(TASK.build()))


def fsdp2() -> Numbers:
    """Shard and evaluate."""
    from torch.distributed.fsdp import fully_shard

    def sharded(model: nn.Module) -> nn.Module:
        for layer in (model[0], model[2]):  # type: ignore[index]
            fully_shard(layer)
        return fully_shard(model)

    return wrapped(sharded)


def accelerate() -> Numbers:
    """Gather the losses for metrics."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, loader = accelerator.prepare(TASK.build(), DataLoader(TASK.dataset(), 1))
    with torch.no_grad():
        losses = [accelerator.gather_for_metrics(TASK.loss(model(x), y).reshape(1)) for x, y in loader]
    return {"loss": torch.cat(losses).sum()}


def lightning() -> Numbers:
    """Evaluate by Fabric."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    return evaluate(fabric.setup(TASK.build()))


def lockstep() -> Numbers:
    """Add over the batches of `run.each`."""
    import lockstep as library

    with library.join(seed=0) as run:
        model = TASK.build()
        model, _ = run.place(model, TASK.sgd(model), strategy="zero3")
        return {"loss": torch.tensor(run.sum(TASK.loss(model(x), y) for x, y in run.each(TASK.dataset(), batch=1)))}


PROGRAM = Program(
    report="PrimeIntellect-ai/prime-rl#2515",
    date="2026-05",
    expects="the sum of the losses of 5 batches, 3 on one rank and 2 on the other",
    reported=("fsdp2",),
    reference=reference,
    contestants={
        "ddp": partial(wrapped, DistributedDataParallel),
        "fsdp2": fsdp2,
        "accelerate": accelerate,
        "lightning": lightning,
        "deepspeed": lambda: evaluate(engine_of(TASK, TASK.build())),
        "lockstep": lockstep,
    },
    limit_s=25,
)
