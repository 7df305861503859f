"""Train for some epochs, get killed after a checkpoint, resume in new processes: which samples were trained on?

Each function has two phases. A rank notes the samples of each of its batches as it trains on them. The second phase
returns how often each sample was trained on by all ranks, and how many different orders the epochs had.
"""

from __future__ import annotations

import json
import os
import random
import time
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from benchmarks.zoo.loops import ranked, trainer_settings
from benchmarks.zoo.program import Numbers, Phases


@dataclass(frozen=True)
class Interrupted:
    """`stop` is the batch of a rank after which it saves and is killed, counted from 0 in epoch `epoch`.

    `batch` is that of a rank. `stateful` takes torchdata's StatefulDataLoader and saves its state.
    """

    samples: int = 64
    batch: int = 4
    epochs: int = 1
    epoch: int = 0
    stop: int = 2
    stateful: bool = False
    shuffle: bool = True

    def dataset(self) -> TensorDataset:
        """Return the numbers of the samples."""
        return TensorDataset(torch.arange(self.samples))

    def loader(self, **settings: Any) -> Any:
        """Return the loader of the documentation."""
        if not self.stateful:
            return DataLoader(self.dataset(), self.batch, **settings)
        from torchdata.stateful_dataloader import StatefulDataLoader

        return StatefulDataLoader(self.dataset(), self.batch, **settings)

    def start(self, resumed: bool) -> tuple[int, int]:
        """Return the epoch to begin with and the batches to skip, as scripts compute them from the number of steps."""
        steps = -(-self.samples // (self.batch * int(os.environ["WORLD_SIZE"])))
        return divmod(self.epoch * steps + self.stop + 1, steps) if resumed else (0, 0)

    def reference(self) -> Numbers:
        """Train on one process without an interruption."""
        torch.manual_seed(0)
        loader = DataLoader(self.dataset(), self.batch, shuffle=self.shuffle)
        for epoch in range(self.epochs):
            for (numbers,) in loader:
                note(epoch, numbers)
        return self.noted()

    def noted(self) -> Numbers:
        """Return what all ranks noted in all phases, once all of them are done."""
        if dist.is_initialized():
            dist.barrier()
        records = [json.loads(line) for file in sorted(Path().glob("noted-*")) for line in file.open()]
        counts = torch.zeros(self.samples, dtype=torch.long)
        for _, numbers in records:
            counts += torch.bincount(torch.tensor(numbers), minlength=self.samples)
        epochs = {epoch for epoch, _ in records}
        orders = {json.dumps([n for e, numbers in records if e == epoch for n in numbers]) for epoch in epochs}
        return {"times": counts, "orders": torch.tensor(len(orders))}


def note(epoch: int, numbers: Tensor) -> None:
    """Write the samples of a batch down."""
    with Path(f"noted-{os.environ['RANK']}").open("a") as file:
        file.write(json.dumps([epoch, numbers.tolist()]) + "\n")


def killed() -> None:
    """End this rank as a kill does, after the others have saved too."""
    rank, size = os.environ["RANK"], int(os.environ["WORLD_SIZE"])
    Path(f"saved-{rank}").touch()
    while len(list(Path().glob("saved-*"))) < size:
        time.sleep(0.02)
    file = Path(f"rank-{rank}.pt")
    torch.save({"numbers": {}, "error": "", "line": ""}, file.with_suffix(".new"))
    file.with_suffix(".new").rename(file)
    os._exit(0)


def torch_only(plan: Interrupted, resumed: bool) -> Numbers:
    """Follow the tutorial: DistributedSampler with set_epoch, and skip batches; or the state of StatefulDataLoader."""
    rank, _ = ranked()
    sampler: DistributedSampler[Any] = DistributedSampler(plan.dataset(), shuffle=plan.shuffle)
    loader = plan.loader(sampler=sampler)
    if resumed and plan.stateful:
        loader.load_state_dict(torch.load(f"loader-{rank}"))
    start, skip = plan.start(resumed)
    for epoch in range(start, plan.epochs):
        sampler.set_epoch(epoch)
        first = skip if epoch == start and not plan.stateful else 0
        for index, (numbers,) in islice(enumerate(loader), first, None):
            note(epoch, numbers)
            if not resumed and (epoch, index) == (plan.epoch, plan.stop):
                if plan.stateful:
                    torch.save(loader.state_dict(), f"loader-{rank}")
                killed()
    return plan.noted()


def accelerate(plan: Interrupted, resumed: bool) -> Numbers:
    """Follow Accelerate's guide on checkpoints: save_state, load_state and skip_first_batches."""
    from accelerate import Accelerator, DataLoaderConfiguration
    from accelerate.utils import set_seed

    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=plan.stateful)
    )
    set_seed(0)
    model = nn.Linear(1, 1)
    loader = DataLoader(plan.dataset(), plan.batch, shuffle=plan.shuffle)
    model, loader = accelerator.prepare(model, loader)
    if resumed:
        accelerator.load_state("state")
    start, skip = plan.start(resumed)
    for epoch in range(start, plan.epochs):
        loader.set_epoch(epoch)
        skips = skip and epoch == start and not plan.stateful
        batches = accelerator.skip_first_batches(loader, skip) if skips else loader
        for index, (numbers,) in enumerate(batches):
            note(epoch, numbers)
            if not resumed and (epoch, index) == (plan.epoch, plan.stop):
                accelerator.save_state("state")
                killed()
    return plan.noted()


def lightning(plan: Interrupted, resumed: bool) -> Numbers:
    """Follow Lightning's guide on checkpoints: ModelCheckpoint, and `ckpt_path` to resume."""
    from lightning.pytorch import LightningModule, Trainer, seed_everything
    from lightning.pytorch.callbacks import ModelCheckpoint

    stop = plan.epoch * (plan.samples // plan.batch // int(os.environ["WORLD_SIZE"])) + plan.stop + 1

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Linear(1, 1)

        def training_step(self, batch: list[Tensor], number: int) -> Tensor:
            note(self.current_epoch, batch[0])
            return self.model(torch.ones(1, 1)).sum()

        def on_train_batch_start(self, *_: object) -> None:
            if not resumed and self.global_step >= stop:
                killed()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    seed_everything(0, verbose=False)
    saving = ModelCheckpoint("saved", every_n_train_steps=stop, save_top_k=-1, filename="at-{step}")
    settings = trainer_settings() | {"enable_checkpointing": True, "callbacks": [saving]}
    trainer = Trainer(strategy="ddp", max_epochs=plan.epochs, **settings)
    trainer.fit(
        Module(), plan.loader(shuffle=plan.shuffle), ckpt_path=f"saved/at-step={stop}.ckpt" if resumed else None
    )
    return plan.noted()


def lockstep(plan: Interrupted, resumed: bool) -> Numbers:
    """Save after a step, and start the script again."""
    import lockstep as library

    world = int(os.environ["WORLD_SIZE"])
    random.seed(0)
    with library.join(seed=0, dir="run") as run:
        torch.manual_seed(0)
        model = nn.Linear(1, 1)
        model, _ = run.place(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy="ddp")
        a_epoch = -(-plan.samples // (plan.batch * world))
        order = None if plan.shuffle else "sequential"
        steps = run.steps(
            plan.dataset(),
            batch=plan.batch * world,
            microbatches=world,
            epochs=plan.epochs,
            **({"order": order} if order else {}),
        )
        for step in steps:
            for (numbers,) in step:
                if not step.duplicate:
                    note(step.epoch, numbers)
                step.backward(mean=model(torch.ones(len(numbers), 1)).mean())
            step.update()
            if not resumed and step.number == plan.epoch * a_epoch + plan.stop + 1:
                run.save()
                killed()
    return plan.noted()


def phases(function: Any, plan: Interrupted) -> Phases:
    """Return the phases before the kill and after it."""
    return (partial(function, plan, False), partial(function, plan, True))


def contestants(plan: Interrupted, **instead: Any) -> dict[str, Any]:
    """Return the functions of all contestants for a plan, some replaced."""
    mine = {"ddp": torch_only, "accelerate": accelerate, "lightning": lightning, "lockstep": lockstep}
    reasons = {
        "fsdp2": "loads data as torch DDP does",
        "deepspeed": "its checkpoint keeps no position in the data; the script skips samples itself",
    }
    return {name: phases(function, plan) for name, function in mine.items()} | reasons | instead
