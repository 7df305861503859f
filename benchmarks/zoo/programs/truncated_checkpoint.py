"""A run whose newest checkpoint was cut short by a kill resumes from the one before."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from benchmarks.zoo.loops import (
    Task,
    engine_of,
    engine_step,
    filled,
    in_order,
    ranked,
    reference,
    trained,
    trainer_settings,
    update_step,
    weights,
)
from benchmarks.zoo.program import Numbers, Program
from benchmarks.zoo.resume import killed, phases


def wide() -> nn.Module:
    """Return a model whose weights are the largest file of each checkpoint."""
    return filled(nn.Sequential(nn.Linear(4, 4000), nn.Tanh(), nn.Linear(4000, 2)))


TASK = Task(wide, samples=24, lr=0.001, strategy="zero2", stage=1)


def cut(folder: str) -> None:
    """Truncate the largest file of the newest checkpoint to half, on rank 0, and be killed."""
    if os.environ["RANK"] == "0":
        saves = [path for path in Path(folder).iterdir() if path.name[-1].isdigit() or path.suffix == ".ckpt"]
        newest = max(saves, key=lambda path: path.stat().st_mtime_ns)
        files = [newest] if newest.is_file() else [file for file in newest.rglob("*") if file.is_file()]
        largest = max(files, key=lambda file: file.stat().st_size)
        os.truncate(largest, largest.stat().st_size // 2)
    killed()


def loop(save: Any, step: Any, first: int, resumed: bool, folder: str) -> None:
    """Train step by step, save after steps 1 and 2, then be killed; or go on from step `first`."""
    batches = list(TASK.mine(int(os.environ["RANK"]), 2))
    for number in range(first, 3):
        step(*batches[number][0])
        if not resumed:
            save(number + 1)
            if number == 1:
                cut(folder)


def fsdp2(_: None, resumed: bool) -> Numbers:
    """Save by torch.distributed.checkpoint, load the folder with the highest number."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.fsdp import fully_shard

    ranked()
    model = fully_shard(TASK.build())
    optimizer, before, first = TASK.sgd(model), weights(TASK.build()), 0
    if resumed:
        first = max(int(path.name) for path in Path("saved").iterdir())
        dcp.load(state := get_model_state_dict(model), checkpoint_id=f"saved/{first}")
        set_model_state_dict(model, state)
    step = partial(update_step, TASK, model, optimizer, Tensor.backward)
    loop(lambda n: dcp.save(get_model_state_dict(model), checkpoint_id=f"saved/{n}"), step, first, resumed, "saved")
    return trained(before, dict(model.named_parameters()), [], {})


def accelerate(_: None, resumed: bool) -> Numbers:
    """Save with automatic names; load_state without a name takes the newest."""
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    naming = ProjectConfiguration(".", automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=naming)
    plain = TASK.build()
    before = weights(plain)
    model, optimizer = accelerator.prepare(plain, TASK.sgd(plain))
    first = 0
    if resumed:
        accelerator.load_state()
        first = len(list(Path("checkpoints").iterdir()))
    step = partial(update_step, TASK, model, optimizer, accelerator.backward)
    loop(lambda n: accelerator.save_state(), step, first, resumed, "checkpoints")
    return trained(before, dict(plain.named_parameters()), [], {})


def lightning(_: None, resumed: bool) -> Numbers:
    """Save by ModelCheckpoint; `ckpt_path="last"` takes the newest."""
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model: nn.Module = TASK.build()

        def training_step(self, batch: Any, number: int) -> Any:
            return TASK.loss(self.model(batch[0]), batch[1])

        def on_train_batch_start(self, *_: object) -> None:
            if not resumed and self.global_step == 2:
                cut("saved")

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return TASK.sgd(self)

    module = Module()
    before = weights(module.model)
    saving = ModelCheckpoint("saved", every_n_train_steps=1, save_top_k=-1, filename="{step}", save_last="link")
    settings = trainer_settings() | {"enable_checkpointing": True, "callbacks": [saving]}
    trainer = Trainer(strategy="ddp", max_epochs=1, use_distributed_sampler=False, **settings)
    trainer.fit(module, in_order(TASK), ckpt_path="last" if resumed else None)
    return trained(before, dict(module.model.named_parameters()), [], {})


def deepspeed(_: None, resumed: bool) -> Numbers:
    """Save by the engine; load_checkpoint without a tag takes the newest."""
    model = TASK.build()
    before = weights(model)
    engine = engine_of(TASK, model)
    first = int(engine.load_checkpoint("saved")[0].split("/")[1]) if resumed else 0
    step = partial(engine_step, TASK, engine)
    loop(lambda n: engine.save_checkpoint("saved", tag=str(n)), step, first, resumed, "saved")
    return trained(before, dict(engine.module.named_parameters()), [], {})


def lockstep(_: None, resumed: bool) -> Numbers:
    """Save after steps 1 and 2, and start the script again."""
    import lockstep as library

    with library.join(seed=0, dir="run") as run:
        plain = TASK.build()
        before = weights(plain)
        model, _ = run.place(plain, TASK.sgd(plain), strategy="zero2")
        for step in run.steps(TASK.dataset(), batch=8, microbatches=2, epochs=1, order="sequential"):
            for x, y in step:
                step.backward(mean=TASK.loss(model(x), y))
            step.update()
            if not resumed:
                run.save()
                if step.number == 2:
                    cut("run/checkpoints")
        assert not resumed or run.step == 3
        return trained(before, dict(model.named_parameters()), [], {})


FUNCTIONS = {"fsdp2": fsdp2, "accelerate": accelerate, "lightning": lightning, "deepspeed": deepspeed}
PROGRAM = Program(
    report="vllm-project/speculators#739",
    date="2026-07",
    expects="the update of 3 steps, resumed after a kill that left half of the checkpoint of step 2",
    reported=(),
    reference=partial(reference, TASK),
    contestants={name: phases(function, None) for name, function in (FUNCTIONS | {"lockstep": lockstep}).items()}  # type: ignore[arg-type]
    | {"ddp": "has no checkpoints; those of torch are in the column of FSDP2"},
)
