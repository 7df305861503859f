"""A call that all ranks must make, made by rank 0 only after the first step."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.zoo.loops import Task, engine_of, engine_step, ranked, reference, trained, update_step, weights
from benchmarks.zoo.program import Numbers, Program

TASK = Task(samples=24, strategy="zero2", stage=1)


def loop(model: Any, before: Any, step: Callable[..., None], save: Callable[[], Any], size: int = 2) -> Numbers:
    """Train 3 steps; rank 0 saves after the first."""
    for number, batches in enumerate(TASK.mine(int(os.environ["RANK"]), size)):
        step(*batches[0])
        if number == 0 and os.environ["RANK"] == "0":
            save()
    return trained(before, dict(model.named_parameters()), [], {})


def torch_only(sharded: bool) -> Numbers:
    """Save by torch.distributed.checkpoint."""
    ranked()
    plain = TASK.build()
    before = weights(plain)
    if sharded:
        from torch.distributed.checkpoint.state_dict import get_model_state_dict
        from torch.distributed.fsdp import fully_shard

        model: Any = fully_shard(plain)
        state: Any = partial(get_model_state_dict, model)
    else:
        model, state = DistributedDataParallel(plain), plain.state_dict
    optimizer = TASK.sgd(model)
    step = partial(update_step, TASK, model, optimizer, Tensor.backward)
    return loop(plain, before, step, lambda: dcp.save(state(), checkpoint_id="saved"))


def accelerate() -> Numbers:
    """Call save_state."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    plain = TASK.build()
    before = weights(plain)
    model, optimizer = accelerator.prepare(plain, TASK.sgd(plain))
    step = partial(update_step, TASK, model, optimizer, accelerator.backward)
    return loop(plain, before, step, lambda: accelerator.save_state("saved"))


def lightning() -> Numbers:
    """Call Fabric's save."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    plain = TASK.build()
    before = weights(plain)
    model, optimizer = fabric.setup(plain, TASK.sgd(plain))
    step = partial(update_step, TASK, model, optimizer, fabric.backward)
    return loop(plain, before, step, lambda: fabric.save("saved.ckpt", {"model": model}))


def deepspeed() -> Numbers:
    """Call the engine's save_checkpoint."""
    model = TASK.build()
    before = weights(model)
    engine = engine_of(TASK, model)
    step = partial(engine_step, TASK, engine)
    return loop(engine.module, before, step, lambda: engine.save_checkpoint("saved"))


def lockstep() -> Numbers:
    """Call run.save."""
    import lockstep as library

    with library.join(seed=0, dir="run") as run:
        plain = TASK.build()
        before = weights(plain)
        model, _ = run.place(plain, TASK.sgd(plain), strategy="zero2")
        for step in run.steps(TASK.dataset(), batch=8, microbatches=2, epochs=1, order="sequential"):
            for x, y in step:
                step.backward(mean=TASK.loss(model(x), y))
            step.update()
            if step.number == 1 and run.rank == 0:
                run.save()
        return trained(before, dict(model.named_parameters()), [], {})


PROGRAM = Program(
    report="ray-project/ray#58229",
    kind="pull",
    date="2025-10",
    expects="the update of 3 steps, or an error that names the call",
    reported=(),
    reference=partial(reference, TASK),
    contestants={
        "ddp": partial(torch_only, False),
        "fsdp2": partial(torch_only, True),
        "accelerate": accelerate,
        "lightning": lightning,
        "deepspeed": deepspeed,
        "lockstep": lockstep,
    },
    limit_s=25,
)
