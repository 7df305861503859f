"""A run that resumes within an epoch validates at the steps at which it would have."""

import json
import os
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.zoo.loops import quiet, trainer_settings
from benchmarks.zoo.program import Numbers, Program
from benchmarks.zoo.resume import killed, phases

DATA = TensorDataset(torch.ones(40, 1))  # 10 steps of 2 samples on each of 2 ranks
EVERY, STOP = 3, 5


def note(step: int) -> None:
    """Write down that a validation begins after a step."""
    with Path(f"validated-{os.environ['RANK']}").open("a") as file:
        file.write(json.dumps(step) + "\n")


def noted() -> Numbers:
    """Return the steps of both phases."""
    return {"steps": torch.tensor([int(line) for line in Path(f"validated-{os.environ['RANK']}").open()])}


def reference() -> Numbers:
    """Count steps in a loop without interruption."""
    for step in range(1, 11):
        if step % EVERY == 0:
            note(step)
    return noted()


def lightning(_: None, resumed: bool) -> Numbers:
    """Validate with `val_check_interval`."""
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Linear(1, 1)

        def training_step(self, batch: list[Tensor], number: int) -> Tensor:
            return self.model(batch[0]).mean()

        def on_train_batch_start(self, *_: object) -> None:
            if not resumed and self.global_step == STOP:
                killed()

        def on_validation_start(self) -> None:
            note(self.global_step)

        def validation_step(self, batch: list[Tensor], number: int) -> None: ...

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    quiet()
    saving = ModelCheckpoint("saved", every_n_train_steps=STOP, save_top_k=-1, filename="at-{step}")
    settings = trainer_settings() | {"enable_checkpointing": True, "callbacks": [saving]}
    trainer = Trainer(strategy="ddp", max_epochs=1, val_check_interval=EVERY, num_sanity_val_steps=0, **settings)
    path = f"saved/at-step={STOP}.ckpt" if resumed else None
    trainer.fit(Module(), DataLoader(DATA, 2), DataLoader(TensorDataset(torch.ones(2, 1)), 1), ckpt_path=path)
    return noted()


def lockstep(_: None, resumed: bool) -> Numbers:
    """Validate in the loop."""
    import lockstep as library

    with library.join(seed=0, dir="run") as run:
        model = nn.Linear(1, 1)
        model, _ = run.place(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy="ddp")
        for step in run.steps(DATA, batch=4, microbatches=2, epochs=1):
            for (x,) in step:
                step.backward(mean=model(x).mean())
            step.update()
            if step.every(steps=EVERY):
                note(step.number)
            if not resumed and step.number == STOP:
                run.save()
                killed()
    return noted()


SCRIPT = "the script decides when it validates"
PROGRAM = Program(
    report="Lightning-AI/pytorch-lightning#19367",
    date="2025-12",
    expects="validations after steps 3, 6 and 9 of 10, interrupted after step 5",
    reported=("lightning",),
    reference=reference,
    contestants=dict.fromkeys(("ddp", "fsdp2", "accelerate", "deepspeed"), SCRIPT)
    | {"lightning": phases(lightning, None), "lockstep": phases(lockstep, None)},  # type: ignore[arg-type]
)
