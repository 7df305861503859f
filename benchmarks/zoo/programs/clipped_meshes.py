"""Clipping takes parameters that are sharded over different meshes."""

from functools import partial

from torch import nn
from torch.nn.utils import clip_grad_norm_

from benchmarks.zoo.loops import Task, contestants, lockstep, ranked, reference, trained, weights
from benchmarks.zoo.program import Numbers, Program

TASK = Task(samples=24, clip=0.1)


def fsdp2() -> Numbers:
    """Shard one layer over a mesh of one axis, the other over one of two axes, as dense layers and experts are."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    rank, size = ranked()
    model = TASK.build()
    assert isinstance(model, nn.Sequential)
    before = weights(model)
    fully_shard(model[0], mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("dense",)))
    fully_shard(model[2], mesh=init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "experts")))
    optimizer, norms = TASK.sgd(model), []
    for step in TASK.mine(rank, size):
        for x, y in step:
            TASK.loss(model(x), y).backward()
        norms.append(clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
        optimizer.zero_grad()
    return trained(before, dict(model.named_parameters()), norms, {})


MESHES = "shards no weights over meshes of the user"
PROGRAM = Program(
    report="pytorch/pytorch#180346",
    date="2026-04",
    expects="the norms of 3 clipped steps with layers on two meshes, and their update",
    reported=("fsdp2",),
    reference=partial(reference, TASK),
    contestants=contestants(
        TASK,
        ddp=MESHES,
        fsdp2=fsdp2,
        accelerate=MESHES,
        lightning=MESHES,
        deepspeed=MESHES,
        lockstep=partial(lockstep, Task(samples=24, clip=0.1, strategy={"name": "mesh", "shard": 2})),
    ),
)
