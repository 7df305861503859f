"""A view of a tensor that is sharded along its last dimension has the numbers of the whole tensor."""

import os

from torch import Tensor, nn

from benchmarks.zoo.loops import Task, filled, ranked, reference, trained, weights
from benchmarks.zoo.program import Numbers, Program


class Folded(nn.Module):
    """Two layers with a view between them that mixes samples and features."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8, bias=False)
        self.down = nn.Linear(6, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).view(-1, 6))


TASK = Task(
    lambda: filled(Folded()), samples=24, batch=24, micro=12, outputs=2, loss=lambda output, y: output.square().mean()
)


def dtensor() -> Numbers:
    """Split the layers by columns and rows with parallelize_module, and use DTensor between them."""
    from torch.distributed.tensor import Replicate, Shard, init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    ranked()
    model = TASK.build()
    before = weights(model)
    plan = {
        "up": ColwiseParallel(output_layouts=Shard(1), use_local_output=False),
        "down": RowwiseParallel(input_layouts=Shard(0), output_layouts=Replicate()),
    }
    parallelize_module(model, init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),)), plan)
    optimizer = TASK.sgd(model)
    for step in TASK.mine(0, 1):
        for x, y in step:
            (TASK.loss(model(x), y) / len(step)).backward()
        optimizer.step()
    return trained(before, dict(model.named_parameters()), [], {})


MESH = {"name": "mesh", "replicate": 2, "tensor": 2}


def lockstep() -> Numbers:
    """Split the layers in two by a plan."""
    import lockstep as library

    with library.join(seed=0) as run:
        plain = TASK.build()
        before = weights(plain)
        plan = {"up": "colwise", "down": "rowwise"}
        model, _ = run.place(plain, TASK.sgd(plain), strategy=MESH, chunks=2, plan=plan)
        for step in run.steps(TASK.dataset(), batch=24, microbatches=2, epochs=1, order="sequential"):
            for x, y in step:
                step.backward(mean=TASK.loss(model(x), y))
            step.update()
        return trained(before, dict(model.named_parameters()), [], {})


NONE = "splits no layers"
PROGRAM = Program(
    report="pytorch/pytorch#179502",
    date="2026-04",
    expects="the update of one step of a model that views 12 x 8 activations, split by columns, as 16 x 6",
    reported=("fsdp2",),
    world=4,
    reference=lambda: reference(TASK),
    contestants={"ddp": NONE, "fsdp2": dtensor, "accelerate": NONE, "lightning": NONE, "deepspeed": NONE}
    | {"lockstep": lockstep},
)
