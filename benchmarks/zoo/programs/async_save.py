"""A checkpoint that is written in the background has the weights of the moment at which it was asked for."""

import os
from functools import partial
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from benchmarks.zoo.loops import ranked
from benchmarks.zoo.program import Numbers, Program

SIZE = 2_000_000


def reference() -> Numbers:
    """Save before the change, on one process, in the foreground."""
    weight = torch.ones(SIZE)
    torch.save(weight, "saved.pt")
    weight += 1
    return {"saved": torch.load("saved.pt")}


def torch_only(sharded: bool) -> Numbers:
    """Call async_save, change the weight in place at once, and load."""
    ranked()
    weight: Tensor = torch.ones(SIZE)
    if sharded:
        from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

        weight = distribute_tensor(weight, init_device_mesh("cpu", (2,)), [Shard(0)])
    future = dcp.async_save({"weight": weight}, checkpoint_id="saved")
    weight += 1
    future.result()
    dcp.load(state := {"weight": torch.zeros_like(weight)}, checkpoint_id="saved")
    return {"saved": state["weight"].full_tensor() if sharded else state["weight"]}  # type: ignore[attr-defined]


def lightning() -> Numbers:
    """Save by Lightning's plugin for asynchronous checkpoints."""
    from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

    weight, plugin = torch.ones(SIZE), AsyncCheckpointIO(TorchCheckpointIO())
    path = Path(f"saved-{os.environ['RANK']}.ckpt").absolute()
    plugin.save_checkpoint({"weight": weight}, path)
    weight += 1
    plugin.teardown()
    return {"saved": torch.load(path)["weight"]}


class Ones(nn.Module):
    """A weight whose gradient is the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(SIZE))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.sum()


def lockstep() -> Numbers:
    """Save after step 1, which leaves the weight at 1; step 2 makes it 2 at once."""
    import lockstep as library

    data = TensorDataset(torch.tensor([[0.0], [0.0], [-1.0], [-1.0]]))
    with library.join(seed=0, dir="run", run={"save_async": True}) as run:
        plain = Ones()
        model, _ = run.place(plain, torch.optim.SGD(plain.parameters(), lr=1.0), strategy="ddp")
        for step in run.steps(data, batch=2, microbatches=2, epochs=1, order="sequential"):
            for (x,) in step:
                step.backward(mean=model(x).mean())
            step.update()
            if step.number == 1:
                run.save()
        assert float(plain.weight.detach()[0]) == 2
    return {"saved": load_file("run/checkpoints/step-00000001/model.safetensors")["weight"]}


PROGRAM = Program(
    report="pytorch/pytorch#144657",
    date="2025-01",
    expects="a weight of 1 in a checkpoint, of a weight that is 2 directly after",
    reported=("ddp",),
    reference=reference,
    contestants={
        "ddp": partial(torch_only, False),
        "fsdp2": partial(torch_only, True),
        "accelerate": "saves in the foreground",
        "lightning": lightning,
        "deepspeed": "saves in the foreground, unless its compiled asynchronous I/O is installed",
        "lockstep": lockstep,
    },
)
