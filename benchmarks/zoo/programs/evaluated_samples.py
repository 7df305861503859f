"""An evaluation counts each sample once, also if ranks cannot share the samples evenly."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from benchmarks.zoo.loops import quiet, ranked, trainer_settings
from benchmarks.zoo.program import Numbers, Program

DATA = TensorDataset(torch.arange(1, 12))


def counted(sums: Tensor) -> Numbers:
    """Return the number of samples and the sum of their values."""
    return {"samples": sums[0].long(), "total": sums[1].long()}


def reference() -> Numbers:
    """Evaluate on one process."""
    return counted(sum(torch.tensor([len(x), x.sum()]) for (x,) in DataLoader(DATA, 2)))  # type: ignore[arg-type]


def torch_only() -> Numbers:
    """Share the samples by DistributedSampler, and add over the ranks."""
    ranked()
    sums = torch.zeros(2)
    for (x,) in DataLoader(DATA, 2, sampler=DistributedSampler(DATA, shuffle=False)):
        sums += torch.tensor([len(x), x.sum()])
    dist.all_reduce(sums)
    return counted(sums)


def accelerate() -> Numbers:
    """Gather for metrics after skipping no batch, as a resumed evaluation does."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(DATA, 2))
    gathered = torch.cat([accelerator.gather_for_metrics(x) for (x,) in accelerator.skip_first_batches(loader, 0)])
    return counted(torch.tensor([len(gathered), gathered.sum()]))


def lightning() -> Numbers:
    """Log sums over the epoch in a validation of the Trainer."""
    from lightning.pytorch import LightningModule, Trainer

    class Module(LightningModule):
        def validation_step(self, batch: list[Tensor], number: int) -> None:
            for name, value in {"samples": len(batch[0]), "total": batch[0].sum()}.items():
                self.log(name, float(value), on_epoch=True, sync_dist=True, reduce_fx="sum")

    quiet()
    [found] = Trainer(strategy="ddp", **trainer_settings()).validate(Module(), DataLoader(DATA, 2), verbose=False)
    return counted(torch.tensor([found["samples"], found["total"]]))


def lockstep() -> Numbers:
    """Add over the batches of `run.each`."""
    import lockstep as library

    with library.join(seed=0) as run:
        model = nn.Linear(1, 1)
        run.place(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy="ddp")
        sums = run.sum({"samples": len(x), "total": x.sum()} for (x,) in run.each(DATA, batch=2))
    return counted(torch.tensor([float(sums["samples"]), float(sums["total"])]))


PROGRAM = Program(
    report="huggingface/accelerate#4235",
    kind="pull",
    date="2026-09",
    expects="11 samples in an evaluation of 11 samples, in batches of 2 on 2 ranks",
    reported=("accelerate",),
    reference=reference,
    contestants={
        "ddp": torch_only,
        "fsdp2": "shares the samples of an evaluation as torch DDP does",
        "accelerate": accelerate,
        "lightning": lightning,
        "deepspeed": "its engine has no evaluation",
        "lockstep": lockstep,
    },
)
