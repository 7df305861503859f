"""The mean of a constant over an epoch is the constant, also if ranks have different numbers of batches."""

import os
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from benchmarks.zoo.loops import quiet, trainer_settings
from benchmarks.zoo.program import Numbers, Program


class Shard(IterableDataset[Tensor]):
    """Four samples on rank 0, three on rank 1."""

    def __iter__(self) -> Iterator[Tensor]:
        yield from torch.ones(4 - int(os.environ.get("RANK", 0)))


def reference() -> Numbers:
    """Average on one process."""
    return {"mean": torch.ones(7).mean()}


def accelerate() -> Numbers:
    """Gather for metrics."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.ones(7)), 1))
    return {"mean": torch.cat([accelerator.gather_for_metrics(x) for (x,) in loader]).mean()}


def lightning() -> Numbers:
    """Log a constant over the epoch."""
    from lightning.pytorch import LightningModule, Trainer

    class Module(LightningModule):
        def validation_step(self, batch: Tensor, number: int) -> None:
            self.log("mean", 1.0, on_epoch=True, sync_dist=True, batch_size=1)

    quiet()
    [found] = Trainer(strategy="ddp", **trainer_settings()).validate(Module(), DataLoader(Shard(), 1), verbose=False)
    return {"mean": torch.tensor(found["mean"])}


def lockstep() -> Numbers:
    """Add over the batches of `run.each`."""
    import lockstep as library

    with library.join(seed=0) as run:
        model = nn.Linear(1, 1)
        run.place(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy="ddp")
        total = run.sum(1.0 for _ in run.each(TensorDataset(torch.ones(7)), batch=1))
    return {"mean": torch.tensor(float(total) / 7)}


NONE = "has no metrics; the script adds them up"
PROGRAM = Program(
    report="Lightning-AI/pytorch-lightning#21859",
    date="2026-07",
    expects="1 as the mean of the constant 1 over 4 batches on one rank and 3 on the other",
    reported=("lightning",),
    reference=reference,
    contestants={"ddp": NONE, "fsdp2": NONE, "deepspeed": NONE}
    | {"accelerate": accelerate, "lightning": lightning, "lockstep": lockstep},
)
