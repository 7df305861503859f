"""A save by rank 0 that takes longer than the timeout of collectives does not end the run."""

import os
import time
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.zoo.loops import Task, engine_of, engine_step, reference, trained, update_step, weights
from benchmarks.zoo.program import Numbers, Program

TASK = Task(samples=24, strategy="ddp", stage=1)
TIMEOUT_S, SAVE_S = 5, 12


def slow_disk() -> None:
    """Make the first write of rank 0 take long, by whatever function it is written."""
    if os.environ["RANK"] != "0":
        return
    late: list[str] = []

    def slowed(function: Any) -> Any:
        def call(*arguments: Any, **settings: Any) -> Any:
            if not late:
                late.append("written")
                time.sleep(SAVE_S)
            return function(*arguments, **settings)

        return call

    torch.save, os.fsync = slowed(torch.save), slowed(os.fsync)


def loop(model: nn.Module, before: Any, step: Any, save: Any) -> Numbers:
    """Train 3 steps; save after the first."""
    slow_disk()
    for number, batches in enumerate(TASK.mine(int(os.environ["RANK"]), 2)):
        step(*batches[0])
        if number == 0:
            save()
    return trained(before, dict(model.named_parameters()), [], {})


def torch_only(sharded: bool) -> Numbers:
    """Gather the weights, write them on rank 0, and wait for it, as torch's tutorials do."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    plain = TASK.build()
    before = weights(plain)
    model: Any = fully_shard(plain) if sharded else DistributedDataParallel(plain)
    optimizer = TASK.sgd(model)
    step = partial(update_step, TASK, model, optimizer, Tensor.backward)

    def save() -> None:
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if dist.get_rank() == 0:
            torch.save(state, "saved.pt")
        dist.barrier()

    return loop(plain, before, step, save)


def accelerate() -> Numbers:
    """Call save_state with a timeout of InitProcessGroupKwargs."""
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs

    waiting = InitProcessGroupKwargs(timeout=timedelta(seconds=TIMEOUT_S))
    accelerator = Accelerator(cpu=True, kwargs_handlers=[waiting])
    plain = TASK.build()
    before = weights(plain)
    model, optimizer = accelerator.prepare(plain, TASK.sgd(plain))
    step = partial(update_step, TASK, model, optimizer, accelerator.backward)
    return loop(plain, before, step, lambda: accelerator.save_state("saved", safe_serialization=False))


def lightning() -> Numbers:
    """Call Fabric's save with a timeout of DDPStrategy."""
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy

    waiting = DDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=TIMEOUT_S))
    fabric = Fabric(accelerator="cpu", devices=2, strategy=waiting)
    fabric.launch()
    plain = TASK.build()
    before = weights(plain)
    model, optimizer = fabric.setup(plain, TASK.sgd(plain))
    step = partial(update_step, TASK, model, optimizer, fabric.backward)
    return loop(plain, before, step, lambda: fabric.save("saved.ckpt", {"model": model}))


def deepspeed() -> Numbers:
    """Call the engine's save_checkpoint with a timeout of init_distributed."""
    model = TASK.build()
    before = weights(model)
    engine = engine_of(TASK, model, timeout=timedelta(seconds=TIMEOUT_S))
    step = partial(engine_step, TASK, engine)
    return loop(engine.module, before, step, lambda: engine.save_checkpoint("saved"))


def lockstep() -> Numbers:
    """Call run.save with placement.timeout_s."""
    import lockstep as library

    with library.join(seed=0, dir="run", placement={"timeout_s": TIMEOUT_S}) as run:
        plain = TASK.build()
        before = weights(plain)
        model, _ = run.place(plain, TASK.sgd(plain), strategy="ddp")
        slow_disk()
        for step in run.steps(TASK.dataset(), batch=8, microbatches=2, epochs=1, order="sequential"):
            for x, y in step:
                step.backward(mean=TASK.loss(model(x), y))
            step.update()
            if step.number == 1:
                run.save()
        return trained(before, dict(model.named_parameters()), [], {})


PROGRAM = Program(
    report="deepspeedai/DeepSpeed#7533",
    date="2025-09",
    expects=f"the update of 3 steps, with a save of {SAVE_S} s and a timeout of {TIMEOUT_S} s",
    reported=("deepspeed",),
    reference=partial(reference, TASK),
    contestants={
        "ddp": partial(torch_only, False),
        "fsdp2": partial(torch_only, True),
        "accelerate": accelerate,
        "lightning": lightning,
        "deepspeed": deepspeed,
        "lockstep": lockstep,
    },
    limit_s=60,
)
